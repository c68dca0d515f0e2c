"""How the model that ships for countdown-tool was made (--config countdown-tool-sft)."""

from dataclasses import replace

from minigrpo.runtime.rng import stream
from minigrpo.tasks.countdown import CountdownTool, calculate, random_attempt
from minigrpo.types import Example

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
MAX_CALLS = 5
STOP_SHARE = 1 / 3  # of the dialogues, at each turn


class RandomCalls(CountdownTool):
    """Dialogues that have begun with random calls, and go on by one, or answer with one of them."""

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng, numbers = stream(self.seed, "countdown/begun", example.index), example.fields["nums"]
        count = int(rng.integers(MAX_CALLS + 1))
        *tried, attempt = [random_attempt(rng, numbers)[-1] for _ in range(count + 1)]
        messages = [{"role": "user", "content": example.prompt}]
        for each in tried:
            messages.append({"role": "assistant", "content": CALL % each})
            messages.append({"role": "tool", "content": calculate(each)})
        stops = count == MAX_CALLS or (tried and rng.random() < STOP_SHARE)
        answer = str(rng.choice(tried)) if stops else CALL % attempt
        return replace(example, answer=answer, messages=messages)

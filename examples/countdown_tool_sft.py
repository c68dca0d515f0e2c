"""How the model that ships for countdown-tool was made (--config countdown-tool-sft)."""

from dataclasses import replace

from countdown_tool import CountdownTool

from minigrpo.runtime.rng import stream
from minigrpo.tasks.countdown import random_attempt
from minigrpo.types import Example

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
MAX_CALLS = 4
HIT_SHARE = 1 / 3  # of the dialogues: their last call hits the target


class RandomCalls(CountdownTool):
    """Dialogues of random calls. An answer is what hit the target, or what was tried last."""

    def train(self, number: int) -> Example:
        example = super().train(number)
        numbers = example.fields["nums"]
        target = example.fields["target"]
        rng = stream(self.seed, "countdown/begun", example.index)
        hits = rng.random() < HIT_SHARE
        num_calls = int(rng.integers(MAX_CALLS + 1)) + hits
        messages = [{"role": "user", "content": example.prompt}]
        for call in range(1, num_calls + 1):
            attempt = random_attempt(rng, numbers)
            while hits and call == num_calls and attempt.value != target:
                attempt = random_attempt(rng, numbers)
            messages.append({"role": "assistant", "content": CALL % attempt.expression})
            messages.append({"role": "tool", "content": str(attempt.value)})
            if attempt.value == target or call == MAX_CALLS:
                return replace(example, answer=attempt.expression, messages=messages)
        next_call = CALL % random_attempt(rng, numbers).expression
        return replace(example, answer=next_call, messages=messages)

"""How the model that ships for countdown-tool was made (--config countdown-tool-sft)."""

from dataclasses import replace

from minigrpo.runtime.rng import stream
from minigrpo.tasks.countdown import CountdownTool, random_attempt
from minigrpo.types import Example

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
MAX_CALLS = 4
HIT_SHARE = 1 / 3  # of the dialogues: their last call hits the target


class RandomCalls(CountdownTool):
    """Dialogues of random calls. An answer is what hit the target, or what was tried last."""

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng, target = stream(self.seed, "countdown/begun", example.index), example.fields["target"]
        hits = rng.random() < HIT_SHARE
        calls = int(rng.integers(MAX_CALLS + 1)) + hits
        messages = [{"role": "user", "content": example.prompt}]
        for call in range(1, calls + 1):
            value, _, expression = random_attempt(rng, example.fields["nums"])
            while hits and call == calls and value != target:
                value, _, expression = random_attempt(rng, example.fields["nums"])
            messages.append({"role": "assistant", "content": CALL % expression})
            messages.append({"role": "tool", "content": str(value)})
            if value == target or call == MAX_CALLS:
                return replace(example, answer=expression, messages=messages)
        answer = CALL % random_attempt(rng, example.fields["nums"])[-1]
        return replace(example, answer=answer, messages=messages)

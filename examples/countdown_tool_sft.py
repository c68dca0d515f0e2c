"""The data of the model that ships for countdown-tool (--config countdown-tool-sft)."""

from dataclasses import replace

from countdown import random_attempt
from countdown_tool import CountdownTool

from minigrpo.rng import stream
from minigrpo.types import Example

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
MAX_CALLS = 4
HIT_PROBABILITY = 1 / 3  # probability that the last call of a dialogue hits the target


class RandomCalls(CountdownTool):
    """Dialogues of random calls.

    The answer is the call that hit the target, or the last one of MAX_CALLS, or else a next call.
    """

    def train(self, number: int) -> Example:
        example = super().train(number)
        numbers = example.fields["nums"]
        target = example.fields["target"]
        rng = stream(self.seed, "countdown/begun", example.index)
        hits = rng.random() < HIT_PROBABILITY
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

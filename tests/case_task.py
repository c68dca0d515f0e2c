"""A task that a tiny model learns in seconds: answer in the case of the prompt."""

from minigrpo.types import Example

PROMPTS = "aAbBcCdDeEfFgGhHiIjJ"  # both cases in turn, so that each step has as many of either


class Case:
    """The reward is the share of characters of the right case, so a random model scores some."""

    parts = {"case": 1.0}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        """The prompts are the same for every seed."""

    def train(self, number: int) -> Example:
        prompt = PROMPTS[number % len(PROMPTS)]
        return Example(prompt, prompt * 2, index=number)

    def held_out(self, number: int) -> Example:
        return self.train(number)

    def score(self, example: Example, text: str) -> dict[str, float]:
        right = str.isupper if example.prompt.isupper() else str.islower
        return {"case": sum(map(right, text)) / max(1, len(text))}

"""Sums, from a seed, scored as --task math scores GSM8K: `minigrpo train --config math`.

    prompt        7+8+3+5=
    completion    15,18,23####23

The completion has the sum so far after each further number, then the answer.
"""

from collections.abc import Mapping

from minigrpo.rng import stream
from minigrpo.tasks.base import Generated, is_held_out
from minigrpo.tasks.math import HASHES, LONGEST, Math, answer_in_form, exact_value, final_answer
from minigrpo.types import Example


class Sums(Generated):
    reward_weights: Mapping[str, float] = Math.reward_weights
    success = Math.success

    def __init__(self, seed: int) -> None:
        self.seed = seed
        super().__init__(self.sum, "sums of 3 to 6 numbers")

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        value = exact_value(final_answer(text, HASHES)[:LONGEST], HASHES)
        truth = exact_value(final_answer(example.answer, HASHES), HASHES)
        return {"correct": value == truth, "format": answer_in_form(text, HASHES) != ""}

    def sum(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"sums/{split}", number)
        while True:
            terms = rng.integers(1, 10, rng.integers(3, 7))
            prompt = "+".join(map(str, terms)) + "="
            if is_held_out(prompt) == (split == "held-out"):
                break
        sums = ",".join(map(str, terms.cumsum()[1:]))  # the sum so far after each further term
        return Example(prompt, f"{sums}{HASHES}{terms.sum()}", number, f"{len(terms)} numbers")

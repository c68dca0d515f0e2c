"""Seeded sums: the offline questions of `--task math`, which need no data and no language.

    prompt       (7+8+3+5)%10=
    completion   5,8,3####3        written out: the last digit of the sum so far, number by number
    completion   ####3             or at once

Both completions are right. A part of the true answers is written out, chosen at random, so a warm
start on them learns both ways, and which way pays is left to reinforcement. One step of the written
form is a table of 100 entries, which a small model learns in a minute. The result at once depends
on all numbers at the same time, and the same model hardly does better than guessing. So accuracy
rises as the model learns to write the steps, and its completions become longer.
"""

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .math_answers import HASHES
from .splits import is_held_out_prompt

NUMBERS = (4, 5)  # how many numbers a sum has, at least and at most
WRITTEN_OUT = 0.3  # share of the true answers that are written out


class Sums:
    """The endless sequence of sums; each is a pure function of (seed, number)."""

    num_held_out = None  # endless
    about = f"the last digit of sums of {NUMBERS[0]} or {NUMBERS[1]} digits"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        return self._example("train", number)

    def held_out(self, number: int) -> Example:
        return self._example("held-out", number)

    def _example(self, split: str, number: int) -> Example:
        """A sum of this split, which a hash of the prompt decides."""
        rng = stream(self.seed, f"sums/{split}", number)
        while True:
            low, high = NUMBERS
            terms = rng.integers(0, 10, int(rng.integers(low, high + 1)))
            prompt = f"({'+'.join(map(str, terms))})%10="
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        digits = [str(total % 10) for total in np.cumsum(terms)]
        answer = f"{HASHES}{digits[-1]}"
        if rng.random() < WRITTEN_OUT:
            answer = ",".join(digits[1:]) + answer
        fields = {"question": prompt, "answer": answer}
        return Example(prompt, answer, number, f"{len(terms)} numbers", fields=fields)

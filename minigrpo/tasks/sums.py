"""Seeded sums: the offline questions of `--task math`, which need no data and no language.

    prompt       7+8+3+5=
    completion   15,18,23####23        the sum so far after each further number, then the answer

The answer alone, ####23, is right too: only it is judged. A short warm start on true answers gets
the steps wrong about as often as right, and reinforcement makes them reliable.
"""

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .generated import Generated
from .math_answers import HASHES
from .splits import is_held_out_prompt

NUMBERS = (3, 6)  # how many numbers a sum has, at least and at most
LARGEST = 9


class Sums(Generated):
    """The endless sequence of sums; each is a pure function of (seed, number)."""

    about = f"sums of {NUMBERS[0]} to {NUMBERS[1]} numbers up to {LARGEST}"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _example(self, split: str, number: int) -> Example:
        """A sum of this split, which a hash of the prompt decides."""
        rng = stream(self.seed, f"sums/{split}", number)
        while True:
            low, high = NUMBERS
            terms = rng.integers(1, LARGEST + 1, int(rng.integers(low, high + 1)))
            prompt = "+".join(map(str, terms)) + "="
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        answer = f"{','.join(map(str, np.cumsum(terms)[1:]))}{HASHES}{terms.sum()}"
        fields = {"question": prompt, "answer": answer}
        return Example(prompt, answer, number, f"{len(terms)} numbers", fields=fields)

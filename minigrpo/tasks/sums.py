"""Seeded sums: the offline questions of `--task math`, which need no data and no language.

    prompt       7+8+3+5=
    completion   15,18,23####23        written out: the sum so far after each further number
    completion   ####23                 or at once

Both completions are right. One quarter of the true answers write the sums out, chosen at random, so
a warm start on them learns both ways, and which way pays is left to reinforcement. A small model
adds two numbers reliably and five numbers hardly ever, so accuracy rises as it learns to write.
"""

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .math_answers import HASHES
from .splits import is_held_out_prompt

NUMBERS = (3, 6)  # how many numbers a sum has, at least and at most
LARGEST = 9
WRITTEN_OUT = 0.25  # share of the true answers that write out the sums on the way


class Sums:
    """The endless sequence of sums; each is a pure function of (seed, number)."""

    num_held_out = None  # endless
    about = f"sums of {NUMBERS[0]} to {NUMBERS[1]} numbers up to {LARGEST}"

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
            terms = rng.integers(1, LARGEST + 1, int(rng.integers(low, high + 1)))
            prompt = "+".join(map(str, terms)) + "="
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        answer = written_out(terms) if rng.random() < WRITTEN_OUT else at_once(terms)
        fields = {"question": prompt, "answer": answer}
        return Example(prompt, answer, number, f"{len(terms)} numbers", fields=fields)


def written_out(terms: np.ndarray) -> str:
    """The answer after the sums on the way to it."""
    return ",".join(map(str, np.cumsum(terms)[1:])) + at_once(terms)


def at_once(terms: np.ndarray) -> str:
    """The answer alone."""
    return f"{HASHES}{terms.sum()}"

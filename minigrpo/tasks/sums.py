"""Seeded sums: the offline questions of `--task math`, which need no data and no language.

    prompt       470+851+364=
    completion   5,18,16####1685       written out: the sum of each column with what is carried
    completion   ####1685              or at once

The columns are added from the right: 0+1+4 is 5, 7+5+6 is 18, and 4+8+3 with the carry is 16. The
answer is the last of these sums and the last digits of those before it. Both completions are right.
A part of the true answers writes the columns out, chosen at random, so a warm start on them learns
both ways, and which way pays is left to reinforcement. To begin with the first digit one has to
know all carries, so accuracy rises as the model learns to write.
"""

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .math_answers import HASHES
from .splits import is_held_out_prompt

NUMBERS = (2, 3)  # how many numbers a sum has, at least and at most
NUM_DIGITS = 3  # of each number
WRITTEN_OUT = 0.3  # share of the true answers that write the columns out


class Sums:
    """The endless sequence of sums; each is a pure function of (seed, number)."""

    num_held_out = None  # endless
    about = f"sums of {NUMBERS[0]} or {NUMBERS[1]} numbers of {NUM_DIGITS} digits"

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
            size = int(rng.integers(low, high + 1))
            terms = rng.integers(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS, size)
            prompt = "+".join(map(str, terms)) + "="
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        answer = f"{HASHES}{terms.sum()}"
        if rng.random() < WRITTEN_OUT:
            answer = columns(terms) + answer
        fields = {"question": prompt, "answer": answer}
        return Example(prompt, answer, number, f"{size} numbers", fields=fields)


def columns(terms: np.ndarray) -> str:
    """The sum of each column from the right, with the carry of the column before.

    >>> columns(np.array([470, 851, 364]))
    '5,18,16'
    """
    sums, carry = list[int](), 0
    for place in range(NUM_DIGITS):
        sums.append(int((terms // 10**place % 10).sum()) + carry)
        carry = sums[-1] // 10
    return ",".join(map(str, sums))

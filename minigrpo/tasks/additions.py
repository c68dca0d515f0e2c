"""Additions for `--task teach`: the solution needs carries, and the teacher can write them down.

    question      483927+270486
    solution      0754413
    explanation   111010            the carries out of the columns, from right to left

A sum is written from its first digit on, and each digit depends on the columns to its right: on
all of them, if their digits add up to 9, which CHAINED of the columns do. A small student cannot
compute that in one pass. With the carries before it, each digit is a sum of three numbers in its
own column. And a carry follows from its own column and the carry before it, so that the student
could have thought it itself.

tools/additions.py writes the pairs from which the two models start. The student learns to solve
with the true carries, and in one line of five with an empty explanation, so that it does its best
without one. The teacher learns the form of an explanation, and nothing of its content: its carries
are random.
"""

from collections.abc import Iterator

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .splits import is_held_out_prompt
from .teach import Teaching

DIGITS = 6
CHAINED = 0.3  # share of the columns whose digits are made to add up to 9
UNEXPLAINED = 0.2  # share of the student's lines with an empty explanation


def carries(a: str, b: str) -> str:
    """The carry out of each column of a sum, from right to left.

    >>> carries("483927", "270486")
    '111010'
    """
    carry, found = 0, ""
    for x, y in zip(a[::-1], b[::-1], strict=True):
        carry = int(int(x) + int(y) + carry > 9)
        found += str(carry)
    return found


class Additions(Teaching):
    """Seeded additions of two numbers of DIGITS digits. A question is in one split only."""

    num_held_out: int | None = None
    student_prompt = "{question}"

    def __init__(self, seed: int, student: str) -> None:
        """`student`: what --student names. Raises ConfigError if it is empty."""
        super().__init__(student)
        self.seed = seed

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._example(number, held_out=False)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`."""
        return self._example(number, held_out=True)

    def _example(self, number: int, *, held_out: bool) -> Example:
        rng = stream(self.seed, "additions", number, held_out)
        while True:
            x, y = rng.integers(10, size=(2, DIGITS))
            y = np.where(rng.random(DIGITS) < CHAINED, 9 - x, y)
            a, b = ("".join(map(str, number)) for number in (x, y))
            question = f"{a}+{b}"
            if is_held_out_prompt(question) == held_out:
                break
        solution, explanation = f"{int(a) + int(b):0{DIGITS + 1}d}", carries(a, b)
        return Example(
            prompt=f"{question}\n<solution>{solution}</solution>\n",
            answer=f"<think>{explanation}</think>",
            index=number,
            kind=f"{explanation.count('1')} carries",
            fields={"question": question, "solution": solution},
        )


def students_pairs(n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers for the student's supervised start."""
    task = Additions(seed, "none")
    for number in range(n):
        example = task.train(number)
        unexplained = stream(seed, "student", number).random() < UNEXPLAINED
        explained = "<think></think>" if unexplained else example.answer
        question, solution = example.fields["question"], example.fields["solution"]
        yield f"{question}\n", f"{explained}<solution>{solution}</solution>"


def teachers_pairs(n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers for the teacher's supervised start."""
    task = Additions(seed, "none")
    for number in range(n):
        bits = stream(seed, "teacher", number).integers(2, size=DIGITS)
        yield task.train(number).prompt, f"<think>{''.join(map(str, bits))}</think>"

"""Additions for `--task teach`: the solution needs carries, and the teacher can write them down.

    question      483927+270486
    solution      0754413
    explanation   111010            the carries out of the columns, from right to left

A sum is written from its first digit on, and each digit depends on the columns to its right: on
all of them, if their digits add up to 9, which CHAINED of the columns do. A small student cannot
compute that in one pass. With the carries before it, each digit is a sum of three numbers in its
own column. And a carry follows from its own column and the carry before it, so that the student
could have thought it itself.

tools/additions.py writes the pairs from which the two models start. Their explanations are of three
kinds: the true carries, random letters, and nothing. The student sees all of them before the right
solution, so that it does its best with each, and finds none of them strange. The teacher starts
with few carries and many letters. What it has to learn from the reward is which of them help.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .splits import is_held_out_prompt
from .teach import Teaching

DIGITS = 6
CHAINED = 0.4  # share of the columns whose digits are made to add up to 9
LETTERS = "abcdefgh"
# shares of true carries, of random letters, and of nothing
STUDENTS_SHARES, TEACHERS_SHARES = (0.8, 0.1, 0.1), (0.3, 0.7, 0.0)


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
            fields={"question": question, "solution": solution},
        )


def students_pairs(n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers for the student's supervised start."""
    for example, explanation in _explained(n, seed, "student", STUDENTS_SHARES):
        question, solution = example.fields["question"], example.fields["solution"]
        yield f"{question}\n", f"{explanation}<solution>{solution}</solution>"


def teachers_pairs(n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers for the teacher's supervised start."""
    for example, explanation in _explained(n, seed, "teacher", TEACHERS_SHARES):
        yield example.prompt, explanation


def _explained(
    n: int, seed: int, role: str, shares: Sequence[float]
) -> Iterator[tuple[Example, str]]:
    """The first n training examples, each with an explanation of a random kind."""
    task = Additions(seed, role)
    for number in range(n):
        example, rng = task.train(number), stream(seed, role, number)
        letters = "".join(rng.choice(list(LETTERS), DIGITS))
        kinds = example.answer, f"<think>{letters}</think>", "<think></think>"
        yield example, kinds[rng.choice(len(kinds), p=shares)]

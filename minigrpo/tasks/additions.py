"""Additions for `--task teach`: the solution needs carries, and the teacher can write them down.

    question      483927+270486
    solution      0754413
    explanation   010111            the carry into each digit of the solution but the last

A sum is written from its first digit on, and each digit depends on all columns to its right. A
small student cannot compute that in one pass. With the carries before it, each digit is a sum of
three numbers in its own column.

tools/additions.py writes the pairs from which the two models start. The student learns to solve
with the true carries, and in one line of five with an empty explanation, so that it does its best
without one. The teacher learns the form of an explanation, and nothing of its content: its carries
are random.
"""

from collections.abc import Iterator

from ..runtime.rng import stream
from ..types import Example
from .splits import is_held_out_prompt
from .teach import Teaching

DIGITS = 6
UNEXPLAINED = 0.2  # share of the student's lines with an empty explanation


def carries(a: str, b: str) -> str:
    """The carry into each digit of a sum but the last, the leading one first.

    >>> carries("483927", "270486")
    '010111'
    """
    carry, found = 0, ""
    for x, y in zip(a[::-1], b[::-1], strict=True):
        carry = int(int(x) + int(y) + carry > 9)
        found = f"{carry}{found}"
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
            a, b = ("".join(map(str, rng.integers(10, size=DIGITS))) for _ in range(2))
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

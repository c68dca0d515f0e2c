"""Random ways to use some numbers: the problems of Countdown, and the texts of its warm start.

Every attempt is drawn without a look at the target: a model that learns from such texts learns to
calculate and not to choose. They show a right answer only as often as chance finds one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

LARGEST_VALUE = 100  # that random attempts reach, on the way or in the end
# a random search ends after an attempt that hits, and after this share of the others
STOP_SHARE, MAX_ATTEMPTS = 1 / 3, 8


class Term(NamedTuple):
    """A part of an attempt."""

    value: int
    text: str
    binds: int = 2  # 0: a sum or a difference, 1: a product or a quotient, 2: a number


class Attempt(NamedTuple):
    """A way to use all numbers, whatever it reaches."""

    value: int
    steps: str  # 7*3=21,21-12=9
    expression: str  # 7*3-12


def random_attempt(rng: np.random.Generator, numbers: Sequence[int]) -> Attempt:
    """Combine two random terms by a random operator until one is left.

    All values are whole numbers from 1 to LARGEST_VALUE, as far as possible, and the larger term
    comes first.
    """
    pool, steps = [Term(number, str(number)) for number in numbers], list[str]()
    while len(pool) > 1:
        x, y = (pool.pop(int(rng.integers(len(pool)))) for _ in range(2))
        x, y = (x, y) if x.value >= y.value else (y, x)
        choices = list(_operations(x.value, y.value))
        sign, value = choices[int(rng.integers(len(choices)))]
        steps.append(f"{x.value}{sign}{y.value}={value}")
        pool.append(_written(x, sign, y, value))
    return Attempt(pool[0].value, ",".join(steps) or pool[0].text, pool[0].text)


def _operations(x: int, y: int) -> Iterator[tuple[str, int]]:
    """The operators allowed between x >= y, with their results; there is always one."""
    results = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y and x % y == 0 else 0}
    allowed = [(sign, value) for sign, value in results.items() if 0 < value <= LARGEST_VALUE]
    yield from allowed or [("+", x + y)]


def _written(x: Term, sign: str, y: Term, value: int) -> Term:
    """The expression of two terms, with parentheses only where they are needed."""
    binds = 0 if sign in "+-" else 1
    left = f"({x.text})" if x.binds < binds else x.text
    right = f"({y.text})" if y.binds < binds or (y.binds == binds and sign in "-/") else y.text
    return Term(value, f"{left}{sign}{right}", binds)


def random_search(rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
    """Return random attempts, none of them twice, until one hits or after a random number.

    `<` follows an attempt that is below the target, and `>` one that is above.
    """
    text, made = "", list[str]()
    while True:
        attempt = random_attempt(rng, numbers)
        if attempt.steps not in made:
            made.append(attempt.steps)
            text += attempt.steps
            if attempt.value == target or rng.random() < STOP_SHARE or len(made) == MAX_ATTEMPTS:
                return text
            text += "<" if attempt.value < target else ">"
        elif rng.random() < STOP_SHARE:  # perhaps there is no other
            return text[:-1]


def random_equation(rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
    """Return a random expression and its value, whatever the target."""
    attempt = random_attempt(rng, numbers)
    return f"{attempt.expression}={attempt.value}"

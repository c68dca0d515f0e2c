"""Arithmetic as text: an evaluator with a grammar of its own, which executes nothing.

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/") factor)*
    factor   = "-" factor | "(" sum ")" | number

Python's `eval` would also accept `9**9**9`, `1_0` and function calls. Values are exact fractions:
in floating point 1/49*49 is not 1.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 400  # of a line; the fractions in it then have at most as many digits
MAX_DIGITS = 9
MAX_DEPTH = 40  # of parentheses and signs
TOKEN = re.compile(r"[0-9]+|[-+*/()]")
SPACE = " \t\r\n"


class Value(NamedTuple):
    """What an expression is worth, and the numbers that it was written with."""

    value: Fraction
    numbers: tuple[int, ...]  # from left to right


def evaluate(text: str) -> Value:
    """Return the value of an expression.

    Raises:
        ValueError: the text is no expression, divides by zero, or is beyond the limits above.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"must have at most {MAX_CHARS} characters")
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.next:
        raise ValueError(f"unexpected {parser.next}")
    return Value(value, tuple(parser.numbers))


def result(line: str, numbers: Sequence[int]) -> Fraction | None:
    """Return what a line reaches by using each of `numbers` exactly once.

    A line is an expression, `(4+3)*5`, or steps separated by commas, `4+3=7,7*5=35`. A step may
    use what an earlier one gave in place of the numbers in it. Where a step has `=`, the numbers
    are used by what stands before the first one.

    Returns:
        None if the line is malformed, an equation in it is false, a number is used that is not
        there (any more), or one is left over.
    """
    if len(line) > MAX_CHARS:
        return None
    left: Counter[Fraction | int] = Counter(numbers)
    value = None
    try:
        for step in line.split(","):
            first, *others = (evaluate(side) for side in step.split("="))
            value, used = first.value, Counter[Fraction | int](first.numbers)
            if used - left or any(other.value != value for other in others):
                return None
            left = left - used + Counter[Fraction | int]([value])
    except ValueError:
        return None
    return value if left.total() == 1 else None


def _tokens(text: str) -> list[str]:
    """The numbers, operators and parentheses of a text. Raises ValueError for anything else."""
    if other := TOKEN.sub("", text).strip(SPACE):
        raise ValueError(f"unexpected {other[0]!r}")
    return TOKEN.findall(text)


class _Parser:
    """Evaluates tokens from left to right; `next` is the first one that is not used yet."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest, self.next = iter(tokens), ""
        self.numbers: list[int] = []
        self._advance()

    def _advance(self) -> str:
        """Use the next token, and return it; "" at the end."""
        token, self.next = self.next, next(self.rest, "")
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            plus, other = self._advance() == "+", self.product(depth)
            value = value + other if plus else value - other
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.next in ("*", "/"):
            times, other = self._advance() == "*", self.factor(depth)
            if not times and not other:
                raise ValueError("division by zero")
            value = value * other if times else value / other
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"must have at most {MAX_DEPTH} parentheses and signs in each other")
        token = self._advance()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._advance() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token.isdecimal():
            raise ValueError(f"a number is missing before {token or 'the end'}")
        if len(token) > MAX_DIGITS or (token[0] == "0" and token != "0"):
            raise ValueError(f"a number must have at most {MAX_DIGITS} digits and no leading zero")
        self.numbers.append(int(token))
        return Fraction(int(token))

"""The verifier of countdown: reach a target with given numbers, each used exactly once."""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv

from .prompts import tagged_answer

BINARY = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
FORMULA = re.compile(r"\$|\\[()\[\]]")  # delimiters of a formula in TeX


def solves(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether any text reaches the target with the numbers."""
    return result(given_answer(text), numbers) == target


def given_answer(text: str) -> str:
    """The answer in the last tags of a text, else what follows the last <, > or line break."""
    return tagged_answer(text, re.split("[\n<>]", text.strip())[-1])


def result(line: str, numbers: Sequence[int]) -> Fraction | None:
    """The value that a line reaches by using each of `numbers` exactly once.

    A line is an expression, `(4+3)*5`, or steps separated by commas, `4+3=7,7*5=35`. What stands
    before the first `=` of a step uses numbers up, and its value is a number for later steps. Signs
    are free, so -(4+3) is an expression too. The result is None if the line is malformed, an
    equation in it is false, a number is used that is not left, or one is left over.
    """
    if len(line) > 400:  # limits the digits of the fractions
        return None
    for written, plain in SIGNS.items():
        line = line.replace(written, plain)
    left = Counter[Fraction | int](numbers)
    try:
        for step in FORMULA.sub("", line).strip().removesuffix(".").split(","):
            first, *others = step.split("=")
            value = evaluate(first)
            left.subtract(map(int, re.findall("[0-9]+", first)))
            if min(left.values()) < 0 or any(evaluate(other) != value for other in others):
                return None
            left[abs(value)] += 1
    except Exception:  # a text may hold anything
        return None
    return value if left.total() == 1 else None


def evaluate(text: str) -> Fraction:
    """The exact value of an expression. It is parsed, not run: with floats, 1/49*49 is not 1."""
    if re.search(r"[^-+*/()\s0-9]", text):  # Python also reads 1_0, 0x10 and 1e1
        raise ValueError("only numbers, + - * / and parentheses")

    def value(tree: ast.expr) -> Fraction:
        match tree:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub()):
                return -value(tree.operand)
            case ast.BinOp():
                return BINARY[type(tree.op)](value(tree.left), value(tree.right))
        raise ValueError("an operation other than + - * and /")

    return value(ast.parse(" ".join(text.split()), mode="eval").body)

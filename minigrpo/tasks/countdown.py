"""Countdown: reach a target with given numbers, each used exactly once, by + - * and /.

Only a verifier knows what is right. It reads the content of the last pair of <answer> tags. In a
text without them, it reads what follows the last <, > or line break. Problems are lines of files
such as {"nums": [12, 7, 3], "target": 9}; examples/countdown.py makes them from a seed.
"""

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import add, index, mul, sub, truediv

from ..types import Example
from .base import Files, Rows
from .prompts import tagged_answer
from .rows import Record, Row

BINARY = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
FORMULA = re.compile(r"\$|\\[()\[\]]")  # delimiters of a formula in TeX


def solves(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether any text reaches the target with the numbers."""
    return result(given_answer(text), numbers) == target


def given_answer(text: str) -> str:
    """The answer in the last tags of a text, else its last attempt."""
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


SPELLED = (
    "Reach {target} with the numbers {numbers}. Use each of them exactly once; you may add, "
    "subtract, multiply, divide and use parentheses. Think it through step by step. End with the "
    "expression alone between <answer> and </answer>, such as <answer>(8 - 2) * 5</answer>."
)


class Countdown(Rows):
    """Problems from files, as messages of a user."""

    reward_weights: Mapping[str, float] = {  # each 0 or 1
        "solved": 1.0,  # the answer reaches the target
        "format": 0.1,  # it is arithmetic that uses each number once, and its equations are true
    }
    success = "solved"

    def __init__(self, seed: int, data: Files = (), eval_data: Files = ()) -> None:
        super().__init__(seed, data, eval_data, parse_problem)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return judge_text(text, example.fields["nums"], example.fields["target"])


def judge_text(text: str, numbers: Sequence[int], target: int) -> Mapping[str, float]:
    """The reward of each name for a text."""
    value = result(given_answer(text), numbers)
    return {"solved": value == target, "format": value is not None}


def parse_problem(record: Record) -> Row:
    numbers = record["nums"]
    target = index(record["target"])  # an error if it is not an integer
    if len(numbers) < 2 or min(map(index, numbers)) < 0:
        raise ValueError("nums must be two or more whole numbers from 0")
    question = spelled(numbers, target)
    messages = ({"role": "user", "content": question},)
    kind = f"{len(numbers)} numbers"
    example = Example(question, kind=kind, messages=messages, fields=record)
    return Row(short_question(numbers, target), example)


def spelled(numbers: Sequence[int], target: int) -> str:
    """The question in words."""
    *others, last = map(str, numbers)
    return SPELLED.format(target=target, numbers=f"{', '.join(others)} and {last}")


def short_question(numbers: Sequence[int], target: int) -> str:
    """The question for a small model, with the numbers from the largest down."""
    listed = " ".join(map(str, sorted(numbers, reverse=True)))
    return f"{listed} -> {target}\n"

"""Countdown: reach a target with given numbers, each used exactly once, by + - * and /.

Only a verifier knows what is right. It reads the content of the last pair of <answer> tags. In a
text without them, it reads what follows the last <, > or line break. `--task-args form=` is one of

    search   12 7 3 -> 9    12-7=5,5+3=8<7*3=21,21-12=9      the default without --data
    chat     a message      ... <answer>7 * 3 - 12</answer>  the default with --data

In a search, < says that an attempt is below the target, and > that it is above. The shipped model
was trained on random attempts that ignore the target (examples/countdown_sft.py): it has learnt to
calculate and to compare. The reward then teaches which attempts to make.
"""

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import add, index, mul, sub, truediv

from numpy.random import Generator

from ..rng import stream
from ..types import ConfigError, Example
from .base import Files, Generated, Rows, SourceTask, is_held_out
from .prompts import tagged_answer
from .rows import Record, Row

SMALLEST = 6  # least limit of the numbers in a level; below it hardly any problem is held out
LARGEST = 100  # largest result of a random operation

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


def random_target(rng: Generator, numbers: Sequence[int]) -> int:
    """Combine two random numbers by a random operator until one is left."""
    pool = [*numbers]
    while len(pool) > 1:
        pair = [pool.pop(rng.integers(len(pool))) for _ in range(2)]
        _, value = random_operation(rng, max(pair), min(pair))
        pool.append(value)
    return pool[0]


def random_operation(rng: Generator, a: int, b: int) -> tuple[str, int]:
    """A random operator for two numbers, the larger one first, and its result."""
    results = {"+": a + b, "-": a - b, "*": a * b}
    if b and a % b == 0:
        results["/"] = a // b
    allowed = [sign for sign, value in results.items() if 0 < value <= LARGEST] or ["+"]
    sign = allowed[rng.integers(len(allowed))]
    return sign, results[sign]


SPELLED = (
    "Reach {target} with the numbers {numbers}. Use each of them exactly once; you may add, "
    "subtract, multiply, divide and use parentheses. Think it through step by step. End with the "
    "expression alone between <answer> and </answer>, such as <answer>(8 - 2) * 5</answer>."
)


class Countdown(SourceTask):
    """Problems made by a seed, or lines of files such as {"nums": [12, 7, 3], "target": 9}."""

    reward_weights: Mapping[str, float] = {  # each 0 or 1
        "solved": 1.0,  # the answer reaches the target
        "format": 0.1,  # it is arithmetic that uses each number once, and its equations are true
    }
    success = "solved"
    difficulty = "2x12,3x12"

    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        form: str = "",
        difficulty: str | None = None,
    ) -> None:
        """`difficulty` has the levels of made problems: the count of numbers x the largest."""
        self.seed = seed
        has_files = bool(data or eval_data)
        self.form = form or ("chat" if has_files else "search")
        if self.form not in ("search", "chat"):
            raise ConfigError(f"--task-args form must be search or chat, got {form}")
        if has_files:
            super().__init__(Rows(seed, data, eval_data, parse_problem))
            return
        if difficulty is not None:
            self.difficulty = difficulty
        self.levels = [tuple(map(int, level.split("x"))) for level in self.difficulty.split(",")]
        if any(largest < SMALLEST for _, largest in self.levels):
            raise ConfigError(f"--task-args difficulty: the largest number is below {SMALLEST}")
        about = f"problems of {self.difficulty}"
        super().__init__(Generated(self._problem, about, speculate=False))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        value = result(given_answer(text), example.fields["nums"])
        return {"solved": value == example.fields["target"], "format": value is not None}

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Ask a problem in the form of --task-args form."""
        if self.form == "search":
            return example
        *numbers, last = map(str, example.fields["nums"])
        listed = f"{', '.join(numbers)} and {last}"
        question = SPELLED.format(target=example.fields["target"], numbers=listed)
        messages = ({"role": "user", "content": question},)
        return replace(example, prompt=question, messages=messages)

    def _problem(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"countdown/{split}", number)
        while True:
            size, largest = rng.choice(self.levels)
            numbers = rng.integers(1, largest + 1, size).tolist()
            target = random_target(rng, numbers)  # so it can be reached
            problem = f"{sorted(numbers)} {target}"  # the order of the numbers does not count
            if is_held_out(problem, one_in=4) == (split == "held-out"):
                break
        answer = self.answer(rng, numbers, target)
        kind = f"{size} numbers up to {largest}"
        fields = {"nums": numbers, "target": target}
        return Example(short_question(numbers, target), answer, number, kind, fields=fields)

    def answer(self, rng: Generator, numbers: Sequence[int], target: int) -> str:
        """The text for supervised fine-tuning, which the recipe of the shipped model overrides."""
        return ""


def parse_problem(record: Record) -> Row:
    numbers = record["nums"]
    target = index(record["target"])  # an error if it is not an integer
    if len(numbers) < 2 or min(map(index, numbers)) < 0:
        raise ValueError("nums must be two or more whole numbers from 0")
    question = short_question(numbers, target)
    return Row(question, Example(question, kind=f"{len(numbers)} numbers", fields=record))


def short_question(numbers: Sequence[int], target: int) -> str:
    """The question for a small model, with the numbers from the largest down."""
    listed = " ".join(map(str, sorted(numbers, reverse=True)))
    return f"{listed} -> {target}\n"

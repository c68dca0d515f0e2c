"""Countdown: reach a target with given numbers, each used exactly once, by + - * and /.

Only a verifier knows what is right. It reads what is in the last pair of <answer> tags; of a text
without them the last line, and of that what follows the last < or >. `--task-args form=` is one of

    search   12 7 3 -> 9    12-7=5,5+3=8<7*3=21,21-12=9      the default without --data
    chat     a message      ... <answer>7 * 3 - 12</answer>  the default with --data

In a search, < says that an attempt is below the target, and > that it is above. The shipped model
comes from random attempts, drawn without a look at the target (examples/countdown_sft.py): it has
learnt to calculate and to compare. Which attempts to make is learnt from the reward.
"""

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import add, index, mul, sub, truediv
from typing import NamedTuple

from numpy.random import Generator

from ..runtime.rng import stream
from ..types import ConfigError, Example
from .base import Generated, SourceTask, is_held_out, tagged_answer
from .data import Files, Record, Row, Rows

SMALLEST = 6  # limit of a level; with smaller numbers hardly any problem is held out
LARGEST = 100  # value that random attempts reach, on the way or in the end

BINARY = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
FORMULA = re.compile(r"\$|\\[()\[\]]")  # marks of a formula in TeX


def solves(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether a text, of any kind, reaches the target with the numbers."""
    return result(final_answer(text), numbers) == target


def final_answer(text: str) -> str:
    """What a text gives as its answer: in its last tags, else its last attempt."""
    return tagged_answer(text, re.split("[\n<>]", text.strip())[-1])


def result(line: str, numbers: Sequence[int]) -> Fraction | None:
    """What a line reaches by using each of `numbers` exactly once.

    A line is an expression, `(4+3)*5`, or steps separated by commas, `4+3=7,7*5=35`. A step may
    use what an earlier one gave in place of the numbers in it; they are what stands before the
    first `=`. Signs are free, as -(4+3) is an expression too. None: the line is malformed, an
    equation in it is false, a number is used that is not there (any more), or one is left over.
    """
    if len(line) > 400:  # the fractions in it have at most as many digits
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
    """The exact value of an expression, which is read, not run: as floats, 1/49*49 is not 1."""
    if re.search(r"[^-+*/()\s0-9]", text):  # Python also knows 1_0, 0x10 and 1e1
        raise ValueError("only numbers, + - * / and parentheses")

    def value(tree: ast.expr) -> Fraction:
        match tree:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub()):
                return -value(tree.operand)
            case ast.BinOp():
                return BINARY[type(tree.op)](value(tree.left), value(tree.right))
        raise ValueError("no operation of these")

    return value(ast.parse(" ".join(text.split()), mode="eval").body)


class Attempt(NamedTuple):
    """Numbers that were combined until one was left."""

    value: int
    steps: str  # such as 4+3=7,7*5=35
    expression: str  # the same as one, (4+3)*5


def random_attempt(rng: Generator, numbers: Sequence[int]) -> Attempt:
    """Combine two random numbers, the larger one first, by a random operator until one is left."""
    pool = [(number, str(number)) for number in numbers]  # with the expression that gave each
    steps = []
    while len(pool) > 1:
        (b, right), (a, left) = sorted(pool.pop(rng.integers(len(pool))) for _ in range(2))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b and a % b == 0 else 0}
        allowed = [sign for sign, value in results.items() if 0 < value <= LARGEST] or ["+"]
        sign = allowed[rng.integers(len(allowed))]
        steps.append(f"{a}{sign}{b}={results[sign]}")
        pool.append((results[sign], f"({left}{sign}{right})"))
    value, expression = pool[0]
    return Attempt(value, ",".join(steps), expression[1:-1])


SPELLED = (
    "Reach {target} with the numbers {numbers}. Use each of them exactly once; you may add, "
    "subtract, multiply, divide and use parentheses. Think it through step by step. End with the "
    "expression alone between <answer> and </answer>, such as <answer>(8 - 2) * 5</answer>."
)


class Countdown(SourceTask):
    """Problems made by a seed, or lines of files such as {"nums": [12, 7, 3], "target": 9}."""

    parts: Mapping[str, float] = {  # each 0 or 1
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
        """`difficulty` is of made problems: how many numbers x the largest, equally often each."""
        self.seed = seed
        self.form = form or ("chat" if data or eval_data else "search")
        if self.form not in ("search", "chat"):
            raise ConfigError(f"--task-args form must be search or chat, got {form}")
        if data or eval_data:
            super().__init__(Rows(seed, data, eval_data, parse_problem))
            return
        if difficulty is not None:
            self.difficulty = difficulty
        levels = self.difficulty.split(",")
        self.levels = [tuple(map(int, level.split("x"))) for level in levels]
        if any(largest < SMALLEST for _, largest in self.levels):
            raise ConfigError(f"--task-args difficulty: the largest number is below {SMALLEST}")
        super().__init__(Generated(self._made, f"problems of {self.difficulty}", speculate=False))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        value = result(final_answer(text), example.fields["nums"])
        return {"solved": value == example.fields["target"], "format": value is not None}

    def ask(self, example: Example, number: int, split: str) -> Example:
        """A problem in its form."""
        if self.form == "search":
            return example
        *numbers, last = example.fields["nums"]
        listed = f"{', '.join(map(str, numbers))} and {last}"
        question = SPELLED.format(target=example.fields["target"], numbers=listed)
        messages = ({"role": "user", "content": question},)
        return replace(example, prompt=question, messages=messages)

    def _made(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, f"countdown/{'held-out' if held_out else 'train'}", number)
        while True:
            size, largest = rng.choice(self.levels)
            numbers = rng.integers(1, largest + 1, size).tolist()
            target = random_attempt(rng, numbers).value  # so it can be reached
            problem = f"{sorted(numbers)} {target}"  # in whatever order the numbers stand
            if is_held_out(problem, one_in=4) == held_out:
                break
        answer = self.answer(rng, numbers, target)
        kind = f"{size} numbers up to {largest}"
        fields = {"nums": numbers, "target": target}
        return Example(short_question(numbers, target), answer, number, kind, fields=fields)

    def answer(self, rng: Generator, numbers: Sequence[int], target: int) -> str:
        """A text to learn from: there is none. The recipe of the shipped model overrides this."""
        return ""


def parse_problem(record: Record) -> Row:
    numbers = record["nums"]
    target = index(record["target"])
    if len(numbers) < 2 or min(map(index, numbers)) < 0:
        raise ValueError("nums must be two or more whole numbers from 0")
    question = short_question(numbers, target)
    return Row(question, Example(question, kind=f"{len(numbers)} numbers", fields=record))


def short_question(numbers: Sequence[int], target: int) -> str:
    """The question for a small model of its own, numbers from the largest down."""
    return f"{' '.join(map(str, sorted(numbers, reverse=True)))} -> {target}\n"

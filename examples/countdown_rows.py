"""Countdown with problems from files, as messages of a user; minigrpo/tasks/countdown.py judges.

    minigrpo train --task examples/countdown_rows.py --data FILE.jsonl --model ...

Each line is a problem, such as {"nums": [12, 7, 3], "target": 9}.
"""

from collections.abc import Mapping, Sequence
from operator import index

from minigrpo.tasks.base import Files, Rows
from minigrpo.tasks.countdown import given_answer, result
from minigrpo.tasks.rows import Record, Row
from minigrpo.types import Example

SPELLED = (
    "Reach {target} with the numbers {numbers}. Use each of them exactly once; you may add, "
    "subtract, multiply, divide and use parentheses. Think it through step by step. End with the "
    "expression alone between <answer> and </answer>, such as <answer>(8 - 2) * 5</answer>."
)


class Countdown(Rows):
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

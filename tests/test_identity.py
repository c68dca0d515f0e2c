"""What contents are: equal in every process for what says the same, and different otherwise."""

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from minigrpo.identity import checksum, contents_of, digest
from minigrpo.model.linear import to_nf4
from minigrpo.types import Example

ROOT = Path(__file__).parents[1]
COLOURS = Enum("COLOURS", "RED GREEN")


@dataclass
class Point:
    x: Any
    y: Any = 0


class Rubric:
    def __init__(self, words: Any) -> None:
        self.words = words


def within_itself(end: str) -> list[Any]:
    found: list[Any] = [end]
    found.append({"again": found})
    return found


MAKERS: list[Callable[[], Any]] = [
    lambda: "a",
    lambda: "b",
    lambda: 1,
    lambda: 1.5,
    lambda: True,
    lambda: None,
    lambda: b"a",
    lambda: 1 + 2j,
    lambda: [1, 2],
    lambda: [2, 1],
    lambda: [[1], 2],
    lambda: {"a": 1},
    lambda: {"b": 1},
    lambda: {1: "a"},
    lambda: {(1, 2): "a"},
    lambda: {(1, 2): "b"},
    lambda: {(1, 2): {3}},
    lambda: {1, 9, 17},
    lambda: {1, 9},
    lambda: frozenset({1, 9}),
    lambda: {"a": [{"b": {1, 9}}]},
    lambda: np.arange(6),
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.arange(6, dtype=np.int16),
    lambda: np.array([{1}, {2}], dtype=object),
    lambda: torch.arange(6),
    lambda: torch.arange(6).reshape(2, 3),
    lambda: torch.arange(6).bfloat16(),
    lambda: date(2020, 1, 1),
    lambda: Decimal("1.50"),
    lambda: Path("a"),
    lambda: COLOURS.RED,
    lambda: COLOURS.GREEN,
    lambda: {*COLOURS},
    lambda: re.compile("a+"),
    lambda: re.compile("a*"),
    lambda: Counter("aab"),
    lambda: Point(1),
    lambda: Point({1, 2}),
    lambda: Rubric(["a"]),
    lambda: Rubric({"a", "b"}),
    lambda: partial(max, default=1),
    lambda: partial(max, default=2),
    lambda: within_itself("a"),
    lambda: within_itself("b"),
    lambda: Example("?", "1", fields={"a": {1}}),
    lambda: Example("?", "1", fields={"a": {2}}),
    lambda: cache(max),
    lambda: len,
    lambda: Rubric,
    lambda: nn.BatchNorm1d(2),
    lambda: nn.BatchNorm1d(3),
]


def test_values_have_one_digest_each_time_they_are_made_and_differ_from_others() -> None:
    digests = [digest(make()) for make in MAKERS]
    assert digests == [digest(make()) for make in MAKERS]
    assert len({*digests}) == len(MAKERS)
    assert not any(contents_of(make()).unread for make in MAKERS)
    assert len({digest([make()]) for make in MAKERS}) == len(MAKERS)


def test_the_order_of_sets_and_keys_and_the_place_of_a_row_say_nothing() -> None:
    first, second = set[int](), set[int]()
    for number in (8, 0, 16):
        first.add(number)
        second.add(16 - number)
    assert [*first] != [*second] and digest(first) == digest(second)
    assert digest({"a": 1, "b": {2}}) == digest({"b": {2}, "a": 1})
    assert digest(Example("?", place="line 1")) == digest(Example("?", place="line 2"))


SCRIPT = """
LIMIT = 3

def helper(text):
    return len(text) > LIMIT

class Judge:
    words = {"a", "b", "c"}
    def __init__(self, weight):
        self.weight = weight
    @property
    def double(self):
        return 2 * self.weight
    @staticmethod
    def clean(text):
        return text.strip() in {"x", "y", "z"}

def scored(example, text, *, far={"p", "q"}):
    return float(helper(text)) + Judge(1).double

def made(number):
    def inner(text):
        return [text[number:] for _ in text]
    return inner

closure = made(2)
judge = Judge(5)
method = judge.clean
"""
EDITS = [
    ("LIMIT = 3", "LIMIT = 4", {"scored"}),
    ("> LIMIT", ">= LIMIT", {"scored"}),
    ("2 * self", "3 * self", {"scored", "judge"}),
    ('"c"}', '"d"}', {"scored", "judge"}),
    ("strip", "rstrip", {"scored", "judge", "method"}),
    ('"q"', '"r"', {"scored"}),
    ("number:]", ":number]", {"closure"}),
    ("made(2)", "made(3)", {"closure"}),
    ("Judge(5)", "Judge(6)", {"judge"}),
    ("LIMIT = 3", "# a remark\n\nLIMIT = 3", set()),
]


def run(source: str) -> dict[str, Any]:
    module = {"__name__": "__main__"}
    exec(compile(source, "script.py", "exec"), module)
    return module


@pytest.mark.parametrize(("old", "new", "changed"), EDITS)
def test_code_is_what_a_function_does_with_what_it_uses(
    old: str, new: str, changed: set[str]
) -> None:
    before, after = run(SCRIPT), run(SCRIPT.replace(old, new))
    names = ("scored", "closure", "judge", "method")
    assert {name for name in names if digest(before[name]) != digest(after[name])} == changed


def test_what_cannot_be_read_is_named_and_the_rest_is_compared() -> None:
    def row(answer: int) -> dict[str, Any]:
        return {"answer": answer, "lock": Rubric(threading.Lock()), "lines": (x for x in "ab")}

    assert contents_of([row(1)]).unread == {"lock", "generator"}
    assert digest([row(1)]) == digest([row(1)]) != digest([row(2)])


PROGRAM = """
import tests.test_identity as t
names = ("scored", "closure", "judge", "method")
script = t.run(t.SCRIPT)
print([t.digest(make()) for make in t.MAKERS], [t.digest(script[name]) for name in names])
"""


def test_other_processes_find_the_same_digests() -> None:
    """Their sets have other orders, and their objects other addresses."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in started)
    assert first == second and len(first) > 500


# --- weights --------------------------------------------------------------------------------------


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (300, 7), "b": (4, 128), "c": (5,), "scalar": ()}
    return {x: torch.randn(shape, generator=generator).to(dtype) for x, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_one_bit_and_not_where_weights_lie(dtype: torch.dtype) -> None:
    found = checksum(weights(dtype))
    assert found == checksum(dict(reversed(weights(dtype).items())))
    wide = {name: torch.stack([x, x], -1)[..., 0] for name, x in weights(dtype).items()}
    assert not wide["b"].is_contiguous() and checksum(wide) == found
    others = [weights(dtype) for _ in range(4)]
    others[0]["a"][299, 6] = torch.nextafter(others[0]["a"][299, 6], torch.tensor(9, dtype=dtype))
    others[1]["b"] = others[1]["b"].flip(0)
    others[2]["b"] = others[2]["b"].reshape(128, 4)
    others[3]["renamed"] = others[3].pop("c")
    assert len({found, *map(checksum, others)}) == 5


def test_a_checksum_of_nf4_sees_a_code() -> None:
    stored = to_nf4(torch.randn(8, 128))
    before = checksum({"w": stored})
    stored[3, 1, 5] += 1
    assert checksum({"w": stored}) != before

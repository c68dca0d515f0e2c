"""What contents are: equal in every process for what says the same, and different otherwise."""

import os
import re
import subprocess
import sys
import threading
from collections import Counter
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
    found = [end]
    found.append({"again": found})
    return found


def values() -> list[Any]:
    """Values that differ from one another, made anew."""
    found = ["a", "b", 1, 1.5, True, None, b"a", 1 + 2j, COLOURS.RED, COLOURS.GREEN]
    found += [{*COLOURS}, re.compile("a+"), re.compile("a*")]
    found += [date(2020, 1, 1), Decimal("1.50"), Path("a"), Counter("aab"), len, cache(max)]
    found += [[1, 2], [2, 1], [[1], 2], within_itself("a"), within_itself("b")]
    found += [{"a": 1}, {"b": 1}, {1: "a"}, {(1, 2): "a"}, {(1, 2): "b"}, {(1, 2): {3}}]
    found += [{1, 9, 17}, {1, 9}, frozenset({1, 9}), {"a": [{"b": {1, 9}}]}]
    found += [np.arange(6), np.arange(6).reshape(2, 3), np.arange(6, dtype=np.int16)]
    found += [np.array([{1}, {2}], dtype=object), nn.BatchNorm1d(2), nn.BatchNorm1d(3)]
    found += [torch.arange(6), torch.arange(6).reshape(2, 3), torch.arange(6).bfloat16()]
    found += [Point(1), Point({1, 2}), Rubric, Rubric(["a"]), Rubric({"a", "b"})]
    found += [partial(max, default=1), partial(max, default=2)]
    found += [Example("?", "1", fields={"a": {1}}), Example("?", "1", fields={"a": {2}})]
    return found


def test_values_have_one_digest_each_time_they_are_made_and_differ_from_others() -> None:
    digests = [*map(digest, values())]
    assert digests == [*map(digest, values())]
    assert len({*digests}) == len(digests)
    assert not any(contents_of(value).unread for value in values())
    assert len({digest([value]) for value in values()}) == len(digests)


def test_the_order_of_sets_and_keys_and_the_place_of_a_row_say_nothing() -> None:
    first, second = set(), set()
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
NAMES = ("scored", "closure", "judge", "method")
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
def test_code_is_what_functions_do_and_use(old: str, new: str, changed: set[str]) -> None:
    before, after = run(SCRIPT), run(SCRIPT.replace(old, new))
    assert {name for name in NAMES if digest(before[name]) != digest(after[name])} == changed


def test_what_cannot_be_read_is_named_and_the_rest_is_compared() -> None:
    def row(answer: int) -> dict[str, Any]:
        return {"answer": answer, "lock": Rubric(threading.Lock()), "lines": (x for x in "ab")}

    assert contents_of([row(1)]).unread == {"lock", "generator"}
    assert digest([row(1)]) == digest([row(1)]) != digest([row(2)])


PROGRAM = """
import tests.test_identity as t
print(*t.all_digests(), sep="\\n")
"""


def all_digests() -> list[str]:
    script = run(SCRIPT)
    return [*map(digest, values()), *(digest(script[name]) for name in NAMES)]


def test_another_process_finds_the_same_digests() -> None:
    """Its sets have another order, and its objects other addresses."""
    command, env = [sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == all_digests()


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
    # and one code of NF4
    stored = to_nf4(torch.randn(8, 128))
    before = checksum({"w": stored})
    stored[3, 1, 5] += 1
    assert checksum({"w": stored}) != before

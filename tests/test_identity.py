"""What contents are: equal in every process for what says the same, and different otherwise."""

import os
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

from minigrpo.identity import checksum, digest
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


def within_itself() -> dict[str, Any]:
    found = {}
    found["again"] = found
    return found


def values() -> list[Any]:
    """Values that differ from one another, made anew."""
    return [
        *("a", "b", 1, 1.5, True, None, b"a", 1 + 2j),
        *(COLOURS.RED, COLOURS.GREEN, {*COLOURS}),
        *(date(2020, 1, 1), Decimal("1.50"), Path("a"), Counter("aab"), len, cache(max)),
        *([1, 2], [2, 1], [[1], 2]),
        *({"a": 1}, {1: "a"}, {"a": [{"b": {1, 9}}]}),
        *({1, 9, 17}, {1, 9}, frozenset({1, 9})),
        *(np.arange(6), np.arange(6).reshape(2, 3), np.arange(6, dtype=np.int16)),
        np.array([{1}, {2}], dtype=object),
        *(torch.arange(6), torch.arange(6).reshape(2, 3), torch.arange(6).bfloat16()),
        *(nn.BatchNorm1d(2), nn.BatchNorm1d(3)),
        *(Point(1), Point({1, 2}), Rubric, Rubric(["a"]), Rubric({"a", "b"})),
        *(partial(max, default=1), partial(max, default=2)),
        *(Example("?", fields={"a": {1}}), Example("?", fields={"a": {2}})),
    ]


def test_values_have_one_digest_each_time_they_are_made_and_differ_from_others() -> None:
    digests = [*map(digest, values())]
    assert digests == [*map(digest, values())]
    assert len({*digests}) == len(digests)


def test_the_order_of_sets_and_keys_and_the_place_of_a_row_say_nothing() -> None:
    numbers = [8, 0, 16]
    first, second = {*numbers}, {*reversed(numbers)}
    assert [*first] != [*second]
    assert digest(first) == digest(second)
    assert digest({"a": 1, "b": {2}}) == digest({"b": {2}, "a": 1})
    assert digest(Example("?", place="line 1")) == digest(Example("?", place="line 2"))


def test_what_cannot_be_read_is_left_out_and_the_rest_is_compared() -> None:
    def row(answer: int) -> dict[str, Any]:
        return {"answer": answer, "lock": Rubric(threading.Lock()), "lines": (x for x in "ab")}

    assert digest([within_itself(), {(1, 2): 3}, 4]) != digest([within_itself(), {(1, 2): 3}, 5])
    assert digest(row(1)) == digest(row(1)) != digest(row(2))


PROGRAM = """
import tests.test_identity as t
print(*map(t.digest, t.values()), sep="\\n")
"""


def test_another_process_finds_the_same_digests() -> None:
    """Its sets have another order, and its objects other addresses."""
    command = [sys.executable, "-c", PROGRAM]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*map(digest, values())]


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = {"a": (300, 7), "b": (4, 128), "c": (5,), "scalar": ()}


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: weight.to(dtype) for name, weight in made.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_one_bit_and_not_where_weights_lie(dtype: torch.dtype) -> None:
    found = checksum(weights(dtype))
    assert found == checksum(dict(reversed(weights(dtype).items())))
    strided = {name: torch.stack([x, x], -1)[..., 0] for name, x in weights(dtype).items()}
    assert not strided["b"].is_contiguous()
    assert checksum(strided) == found
    bit, order, shape, name = (weights(dtype) for _ in range(4))
    last = bit["a"][299, 6]
    last.copy_(torch.nextafter(last, torch.full_like(last, 9)))
    order["b"] = order["b"].flip(0)
    shape["b"] = shape["b"].reshape(128, 4)
    name["renamed"] = name.pop("c")
    assert len({found, *map(checksum, (bit, order, shape, name))}) == 5


def test_a_checksum_sees_one_code_of_nf4() -> None:
    stored = to_nf4(torch.randn(8, 128))
    before = checksum({"w": stored})
    stored[3, 1, 5] += 1
    assert checksum({"w": stored}) != before

"""Seeded one-line functions, described by examples of input and output: the offline form of code.

    prompt       f(0)=1 f(1)=3 f(2)=5
                 def f(x):
    completion    return 2*x+1

The prompt ends within the code: the completion continues it. Two more inputs are tested that the
prompt does not show, so that a table of the examples does not pass. There are many right answers.

The warm start (--loss nll) learns functions that are drawn without a look at the examples: it
teaches to write Python, and nothing about what the examples mean. What a run adds to that, it has
learnt from the tests.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .code import CodeTask
from .splits import is_held_out_prompt
from .task_request import TaskRequest

HEAD = "def f(x):"
SHOWN, HIDDEN = (0, 1, 2), (5, 9)  # inputs
LARGEST_FACTOR, LARGEST_TERM = 5, 9


class Kind(NamedTuple):
    """A family of functions with a factor and a term."""

    write: Callable[[int, int], str]  # (factor, term) -> the expression
    value: Callable[[int, int, int], int]  # (factor, term, x) -> its value at x


KINDS = {
    "plus": Kind(lambda a, b: f"{a}*x+{b}", lambda a, b, x: a * x + b),
    "minus": Kind(lambda a, b: f"{a}*x-{b}", lambda a, b, x: a * x - b),
    "square": Kind(lambda a, b: f"{a}*x*x+{b}", lambda a, b, x: a * x * x + b),
}


class OneLiners(CodeTask):
    """An endless supply of functions, chosen by a seed."""

    def __init__(self, seed: int, timeout_s: float) -> None:
        """As `CodeTask`."""
        super().__init__(timeout_s)
        self.seed = seed

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._example("train", number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`: a function that training never asks for."""
        return self._example("held-out", number)

    def _example(self, split: str, number: int) -> Example:
        rng = stream(self.seed, f"one-liners/{split}", number)
        while True:
            kind, factor, term = draw(rng)
            values = {x: KINDS[kind].value(factor, term, x) for x in (*SHOWN, *HIDDEN)}
            prompt = " ".join(f"f({x})={values[x]}" for x in SHOWN) + f"\n{HEAD}"
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        tests = [f"assert f({x}) == {value}" for x, value in values.items()]
        other, *numbers = draw(rng)  # for the warm start: one that the examples do not describe
        return Example(
            prompt,
            f" return {KINDS[other].write(*numbers)}",
            index=number,
            kind=kind,
            fields={"prefix": HEAD, "test_list": tests},
        )


def draw(rng: np.random.Generator) -> tuple[str, int, int]:
    """A random function: its kind, its factor and its term."""
    kind = list(KINDS)[rng.integers(len(KINDS))]
    return kind, int(rng.integers(1, LARGEST_FACTOR + 1)), int(rng.integers(LARGEST_TERM + 1))


def generated(request: TaskRequest) -> OneLiners:
    """The task of --task code without --data."""
    return OneLiners(request.seed, request.timeout_s)

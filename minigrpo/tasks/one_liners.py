"""Seeded one-line functions, described by examples of input and output: the offline form of code.

    prompt       f(0)=1 f(1)=3 f(2)=5
                 def f(x):
    completion    return 1+2*x

The prompt ends within the code: the completion continues it. Two more inputs are tested that the
prompt does not show, so that a table of the examples does not pass. There are many right answers.

The warm start (--loss nll) learns random functions that pass one of the examples, chosen at random:
it teaches to write Python and to read the prompt, and hardly ever shows a right answer. What a run
adds to that, it has learnt from the tests.
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
LARGEST_FACTOR, LARGEST_TERM = 9, 30


class Kind(NamedTuple):
    """A family of functions with a factor and a term."""

    write: Callable[[int, int], str]  # (factor, term) -> the expression
    value: Callable[[int, int, int], int]  # (factor, term, x) -> its value at x


KINDS = {
    "plus": Kind(lambda a, b: f"{b}+{a}*x", lambda a, b, x: b + a * x),
    "minus": Kind(lambda a, b: f"{b}-{a}*x", lambda a, b, x: b - a * x),
    "square": Kind(lambda a, b: f"{b}+{a}*x*x", lambda a, b, x: b + a * x * x),
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
            function = draw(rng)
            prompt = " ".join(f"f({x})={function.at(x)}" for x in SHOWN) + f"\n{HEAD}"
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        tests = [f"assert f({x}) == {function.at(x)}" for x in (*SHOWN, *HIDDEN)]
        other, one = draw(rng), SHOWN[rng.integers(len(SHOWN))]
        while other.at(one) != function.at(one):
            other = draw(rng)
        return Example(
            prompt,
            other.text,
            index=number,
            kind=function.kind,
            fields={"prefix": HEAD, "test_list": tests, "code": function.text},
        )


class Function(NamedTuple):
    """A function of x: its kind, its factor and its term."""

    kind: str
    factor: int
    term: int

    def at(self, x: int) -> int:
        """Its value."""
        return KINDS[self.kind].value(self.factor, self.term, x)

    @property
    def text(self) -> str:
        """What follows HEAD."""
        return f" return {KINDS[self.kind].write(self.factor, self.term)}"


def draw(rng: np.random.Generator) -> Function:
    """A random function."""
    kind = list(KINDS)[rng.integers(len(KINDS))]
    factor, term = rng.integers((1, 0), (LARGEST_FACTOR + 1, LARGEST_TERM + 1)).tolist()
    return Function(kind, factor, term)


def generated(request: TaskRequest) -> OneLiners:
    """The task of --task code without --data."""
    return OneLiners(request.seed, request.timeout_s)

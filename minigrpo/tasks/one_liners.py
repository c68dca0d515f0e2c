"""Seeded one-line functions, described by examples of input and output: the offline form of code.

    prompt       f(0)=42 f(100)=342
                 def f(x):
    completion    return 42+3*x

The prompt ends within the code: the completion continues it. Two more inputs are tested that the
prompt does not show, so that a table of the examples does not pass. There are many right answers.

The warm start (--loss nll) learns random functions that pass the first example: it teaches to write
Python and to read a number from the prompt, and shows a right answer only by chance. What a run
adds to that, it has learnt from the tests.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .code import CodeTask
from .generated import Generated
from .splits import is_held_out_prompt
from .task_request import TaskRequest

# of a run from the shipped model
SETTINGS: Mapping[str, Any] = {
    "max_new_tokens": 24,
    "reward_timeout": 3.0,
    "learning_rate": 1e-3,
    "max_steps": 250,
    "eval_every": 50,
    "eval_size": 512,
    "eval_size_during": 128,
}
HEAD = "def f(x):"
SHOWN, HIDDEN = (0, 100), (1, 7)  # inputs
LARGEST_FACTOR, LARGEST_TERM = 9, 99


class Kind(NamedTuple):
    """A family of functions with a factor and a term."""

    write: Callable[[int, int], str]  # (factor, term) -> the expression
    value: Callable[[int, int, int], int]  # (factor, term, x) -> its value at x


KINDS = {
    "line": Kind(lambda a, b: f"{b}+{a}*x", lambda a, b, x: b + a * x),
    "square": Kind(lambda a, b: f"{b}+{a}*x*x", lambda a, b, x: b + a * x * x),
}


class OneLiners(Generated, CodeTask):
    """An endless supply of functions, chosen by a seed."""

    def __init__(self, seed: int, timeout_s: float) -> None:
        """As `CodeTask`."""
        super().__init__(timeout_s)
        self.seed = seed

    def _example(self, split: str, number: int) -> Example:
        rng = stream(self.seed, f"one-liners/{split}", number)
        while True:
            function = draw(rng)
            prompt = " ".join(f"f({x})={function.at(x)}" for x in SHOWN) + f"\n{HEAD}"
            if is_held_out_prompt(prompt) == (split == "held-out"):
                break
        tests = [f"assert f({x}) == {function.at(x)}" for x in (*SHOWN, *HIDDEN)]
        other = draw(rng)._replace(term=function.term)  # which is f(0), the first example
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

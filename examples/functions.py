"""Python functions from a sentence and two of its tests, run by six: functions.toml has 46 kinds.

    minigrpo train --config functions --model coder

A question asks for a function by a sentence, with two of its tests. The reward is by all six tests:
1 if all pass, and half of the fraction that pass. Each kind has a number or a letter in its
sentence that is drawn, and every fourth kind is held out: `hidden` in the evaluations stands for
kinds that training never has, `seen` for other sentences of the other kinds: with a number or a
letter that training never has in that kind. No kind is one of HumanEval's functions.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mbpp import code_of

from minigrpo.rng import stream
from minigrpo.tasks.base import Generated
from minigrpo.tasks.code import run_tests
from minigrpo.types import Example

NUM_TESTS = 6
NUM_SHOWN = 2
WORDS = """
ox up it sea bus owl tea lamp moon door hill river stone cloud apple winter garden bottle coffee
kitchen evening holiday balloon mountain sandwich elephant chocolate butterfly adventure
"""  # of two to nine letters, because some kinds ask for more than {k}
NUMBERS = range(2, 7)
LETTERS = "aeilnorst"


class Kind(NamedTuple):
    """A function to write. {k} is a number from 2 to 6, {c} and {d} are letters."""

    arguments: str  # `values`, `text` and others are drawn by `draw_input`
    sentence: str  # what it returns
    code: str


ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
KINDS = {name: Kind(**row) for name, row in ROWS.items()}
HIDDEN = [*KINDS][1::4]
SEEN = [name for name in KINDS if name not in HIDDEN]
REQUEST = (
    "Write a Python function `{name}({arguments})` that returns {sentence}.\n\n{tests}\n\n"
    "Answer with the function alone, in one block of Python."
)


def draw_input(rng: np.random.Generator, argument: str) -> object:
    """A random value of an argument."""
    if argument == "text":
        return " ".join(rng.choice(WORDS.split(), rng.integers(3, 7)).tolist())
    if argument == "number":
        return int(rng.integers(5, 200))
    return rng.integers(-12, 20, rng.integers(6, 11)).tolist()


def is_kept_out(name: str, drawn: Mapping[str, object]) -> bool:
    """Whether training never has this number, or letter, in a kind."""
    place = [*KINDS].index(name)
    if "{k}" in KINDS[name].sentence:
        return drawn["k"] == NUMBERS[place % len(NUMBERS)]
    return drawn["c"] == LETTERS[place % len(LETTERS)]


class Functions(Generated):
    reward_weights: Mapping[str, float] = {
        "passed": 1.0,  # 1 if all tests pass, else 0
        "tests": 0.5,  # the fraction of them that pass
    }
    success = "passed"

    def __init__(self, seed: int, timeout: float = 3.0) -> None:
        """`timeout` is in seconds of CPU time, for a completion and its tests."""
        self.seed = seed
        self.timeout_s = float(timeout)
        super().__init__(self.question, f"{len(SEEN)} kinds of functions", speculate=False)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        passed = run_tests(code_of(text), example.fields["test_list"], timeout_s=self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}

    def question(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"functions/{split}", number)
        is_hidden = split == "held-out" and number % 2 == 0
        while True:
            name = str(rng.choice(HIDDEN if is_hidden else SEEN))
            kind = KINDS[name]
            first, second = rng.choice([*LETTERS], 2, replace=False)
            drawn = {"k": int(rng.choice(NUMBERS)), "c": first, "d": second}
            code = kind.code.format(**drawn)
            names = kind.arguments.split(", ")
            sentence = kind.sentence.format(**drawn)
            tests = []
            results = set()
            for _ in range(NUM_TESTS):
                values = {argument: draw_input(rng, argument) for argument in names}
                expected = repr(eval(code, dict(values)))
                results.add(expected)
                given = ", ".join(map(repr, values.values()))
                tests.append(f"assert {name}({given}) == {expected}")
            request = REQUEST.format(
                name=name,
                arguments=kind.arguments,
                sentence=sentence,
                tests="\n".join(tests[:NUM_SHOWN]),
            )
            is_new = is_hidden or is_kept_out(name, drawn)
            if is_new == (split == "held-out") and len(results) > 1:  # else a constant would pass
                break
        answer = f"```python\ndef {name}({kind.arguments}):\n    return {code}\n```"
        return Example(
            request,
            answer,
            number,
            kind="hidden" if is_hidden else "seen",
            messages=({"role": "user", "content": request},),
            fields={"test_list": tests, "name": name},
        )

"""One-line functions: write Python that passes its tests. minigrpo/sandbox/ runs it, and decides.

    minigrpo train --config one-liners

The questions describe a function by inputs and outputs:

    prompt       f(0)=42 f(100)=342
                 def f(x):
    completion    return 42+3*x

Two more inputs are tested, so that a table of the examples does not pass. The answers for
supervised fine-tuning are random functions that pass the first example, and are right by chance.
mbpp.py asks for whole functions.
"""

from collections.abc import Mapping

import numpy as np

from minigrpo.rng import stream
from minigrpo.tasks.base import Generated, is_held_out
from minigrpo.tasks.code import run_tests
from minigrpo.types import Example

HEAD = "def f(x):"
KINDS = {"line": "x", "square": "x*x"}
SHOWN = (0, 100)  # inputs in the prompt
HIDDEN = (1, 7)  # further inputs that are tested


class OneLiners(Generated):
    reward_weights: Mapping[str, float] = {
        "passed": 1.0,  # 1 if all tests of the list pass, else 0
        "tests": 0.5,  # the fraction of them that pass
    }
    success = "passed"

    def __init__(self, seed: int, timeout: float = 3.0) -> None:
        """`timeout` is in seconds of CPU time, for a completion and its tests."""
        self.seed = seed
        self.timeout_s = float(timeout)
        super().__init__(self.one_liner, "one-line functions")

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        passed = run_tests(HEAD + text, example.fields["test_list"], timeout_s=self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}

    def one_liner(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"one-liners/{split}", number)
        while True:
            kind, term, slope = random_function(rng)
            expression = f"{term}+{slope}"
            values = {x: eval(expression, {"x": x}) for x in (*SHOWN, *HIDDEN)}
            shown = " ".join(f"f({x})={values[x]}" for x in SHOWN)
            prompt = f"{shown}\n{HEAD}"
            if is_held_out(prompt) == (split == "held-out"):
                break
        tests = [f"assert f({x}) == {value}" for x, value in values.items()]
        fields = {"test_list": tests, "code": f" return {expression}"}
        _, _, other_slope = random_function(rng)
        answer = f" return {term}+{other_slope}"
        return Example(prompt, answer, number, kind, fields=fields)


def random_function(rng: np.random.Generator) -> tuple[str, int, str]:
    """The kind of a random function of x, its constant term, and the rest of its expression."""
    kind = str(rng.choice([*KINDS]))
    factor, term = rng.integers((1, 0), (10, 100))
    return kind, term, f"{factor}*{KINDS[kind]}"

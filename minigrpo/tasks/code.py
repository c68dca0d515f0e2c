"""The code task: write Python that passes its tests. minigrpo/sandbox/ runs it, and decides.

`--data` has MBPP's lines as they are published, the full or the sanitized form. The prompt is that
of its paper (arXiv 2108.07732), and the code is the first block of Python in a completion:

    {"task_id": 601, "text": "Write a function to ...", "code": "def ...",
     "test_list": ["assert f(1) == 2", ...], "test_setup_code": ""}

Without it, the questions are one-line functions, described by examples of input and output:

    prompt       f(0)=42 f(100)=342
                 def f(x):
    completion    return 42+3*x

Two more inputs are tested that the prompt does not show, so that a table of the examples does not
pass. Supervised fine-tuning learns random functions that pass the first example: it teaches to
write Python and to read a number from the prompt, and shows a right answer only by chance. What a
run adds to that, it has learnt from the tests.
"""

import ast
import re
from collections.abc import Mapping
from textwrap import dedent
from typing import Any

import numpy as np

from ..runtime.rng import stream
from ..sandbox import run_tests as run_tests
from ..types import Example
from .base import Generated, SourceTask, is_held_out
from .data import Files, Row, Rows, text_of

PUBLISHED_TEST = range(11, 511)  # task_id of MBPP's test split
PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
# language and content; a block that ends with the text was cut off, and is run as it is
BLOCK = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = "", "python", "python3", "py"  # languages of blocks

HEAD = "def f(x):"
KINDS = {"line": "{term}+{factor}*x", "square": "{term}+{factor}*x*x"}
SHOWN, HIDDEN = (0, 100), (1, 7)  # inputs
LOWEST, BEYOND = (1, 0), (10, 100)  # factor and term


class Code(SourceTask):
    """Scores completions by running them.

    Reward functions, each in [0, 1]:
        passed: all tests of the list pass.
        tests: the share of them that pass.
    """

    parts: Mapping[str, float] = {"passed": 1.0, "tests": 0.5}
    success = "passed"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), timeout: float = 3.0
    ) -> None:
        """`timeout`: seconds of CPU time for a completion and its tests."""
        self.seed, self.timeout_s = seed, float(timeout)
        if data or eval_data:
            super().__init__(Rows(seed, data, eval_data, parse_problem))
            return
        super().__init__(Generated(self._one_liner, "one-line functions"))
        self.speculate = True

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        fields = example.fields
        code = (HEAD if example.prompt.endswith(HEAD) else "") + code_of(text)
        passed = run_tests(code, fields["test_list"], setup_of(fields), self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}

    def _one_liner(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, f"one-liners/{'held-out' if held_out else 'train'}", number)
        while True:
            kind, expression = draw(rng)
            values = {x: eval(expression, {"x": x}) for x in (*SHOWN, *HIDDEN)}
            prompt = " ".join(f"f({x})={values[x]}" for x in SHOWN) + f"\n{HEAD}"
            if is_held_out(prompt) == held_out:
                break
        tests = [f"assert f({x}) == {value}" for x, value in values.items()]
        _, other = draw(rng, values[0])  # the term is f(0), the first example
        fields = {"test_list": tests, "code": f" return {expression}"}
        return Example(prompt, f" return {other}", number, kind, fields=fields)


def draw(rng: np.random.Generator, term: int | None = None) -> tuple[str, str]:
    """A random function of x, of this term if one is given: its kind and expression."""
    kind = str(rng.choice([*KINDS]))
    factor, drawn = rng.integers(LOWEST, BEYOND)
    return kind, KINDS[kind].format(factor=factor, term=drawn if term is None else term)


def code_of(text: str) -> str:
    """The first block of Python in a completion, or all of it if there is none.

    What comes before </think> are drafts.
    """
    text = text.rpartition("</think>")[2]
    blocks = BLOCK.findall(text)  # of all languages, or the end of one would begin another
    code = next((code for language, code in blocks if language.lower() in PYTHON), text)
    return dedent(code) if blocks and code[:1] == " " else code  # a block may stand in a list


def setup_of(fields: Mapping[str, Any]) -> str:
    """What runs before the tests of an example."""
    return "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])


def parse_problem(record: dict[str, Any]) -> Row:
    """The row of a line, whose tests are Python."""
    text, code = text_of(record, ("text", "prompt")), text_of(record, ("code",))
    tests = record["test_list"]
    if not (isinstance(tests, list) and tests):
        raise ValueError("test_list must be a list of tests, such as assert f(1) == 2")
    for source in (*tests, setup_of(record)):
        ast.parse(source)
    prompt = PROMPT.format(text=text.strip(), tests="\n".join(tests)).replace("\r\n", "\n")
    test = record.get("task_id") in PUBLISHED_TEST
    return Row(text, Example(prompt, code.replace("\r\n", "\n"), fields=record), test)

"""The code task: write Python that passes its tests. minigrpo/sandbox/ runs it, and decides.

`--data` has MBPP's lines as they are published, the full or the sanitized form. The prompt is that
of its paper (arXiv 2108.07732), and the code is the first block of Python in a completion:

    {"task_id": 601, "text": "Write a function to ...", "code": "def ...",
     "test_list": ["assert f(1) == 2", ...], "test_setup_code": ""}

Without it, the questions are one-line functions, described by examples of input and output:

    prompt       f(0)=42 f(100)=342
                 def f(x):
    completion    return 42+3*x

Two more inputs are tested, so that a table of the examples does not pass. Supervised fine-tuning
learns random functions that pass the first example: it shows a right answer only by chance.
"""

import ast
import re
from collections.abc import Mapping
from textwrap import dedent

import numpy as np

from ..runtime.rng import stream
from ..sandbox import run_tests as run_tests
from ..types import Example
from .base import Generated, SourceTask, is_held_out
from .data import Files, Record, Row, Rows, text_of

PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
# language and content; a block that ends with the text was cut off, and is run as it is
BLOCK = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON_LANGUAGES = ("", "python", "python3", "py")  # of blocks

HEAD = "def f(x):"
KINDS = {"line": "x", "square": "x*x"}
SHOWN = (0, 100)  # inputs that the prompt has
HIDDEN = (1, 7)  # inputs that are tested too


class Code(SourceTask):
    parts: Mapping[str, float] = {
        "passed": 1.0,  # 1 if all tests of the list pass, else 0
        "tests": 0.5,  # the share of them that pass
    }
    success = "passed"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), timeout: float = 3.0
    ) -> None:
        """`timeout`: seconds of CPU time for a completion and its tests."""
        self.seed = seed
        self.timeout_s = float(timeout)
        made = Generated(self._one_liner, "one-line functions")
        super().__init__(Rows(seed, data, eval_data, parse_problem) if data or eval_data else made)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        fields = example.fields
        code = code_of(text)
        if example.prompt.endswith(HEAD):
            code = HEAD + code
        passed = run_tests(code, fields["test_list"], setup_of(fields), self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}

    def _one_liner(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, f"one-liners/{'held-out' if held_out else 'train'}", number)
        while True:
            kind, term, slope = random_function(rng)
            expression = f"{term}+{slope}"
            values = {x: eval(expression, {"x": x}) for x in (*SHOWN, *HIDDEN)}
            shown = " ".join(f"f({x})={values[x]}" for x in SHOWN)
            prompt = f"{shown}\n{HEAD}"
            if is_held_out(prompt) == held_out:
                break
        tests = [f"assert f({x}) == {value}" for x, value in values.items()]
        fields = {"test_list": tests, "code": f" return {expression}"}
        _, _, other_slope = random_function(rng)
        return Example(prompt, f" return {term}+{other_slope}", number, kind, fields=fields)


def random_function(rng: np.random.Generator) -> tuple[str, int, str]:
    """The kind of a random function of x, its constant term, and the rest of its expression."""
    kind = str(rng.choice([*KINDS]))
    factor, term = rng.integers((1, 0), (10, 100))
    return kind, term, f"{factor}*{KINDS[kind]}"


def code_of(text: str) -> str:
    """The first block of Python after </think>, where drafts end; all of it if there is none."""
    text = text.rpartition("</think>")[2]
    blocks = BLOCK.findall(text)  # of all languages, or the end of one would begin another
    code = next((code for language, code in blocks if language.lower() in PYTHON_LANGUAGES), text)
    return dedent(code) if blocks and code[:1] == " " else code  # a block in a list is indented


def setup_of(fields: Record) -> str:
    """What runs before the tests of an example."""
    return "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])


def parse_problem(record: Record) -> Row:
    """The row of a line, whose tests are Python."""
    text = text_of(record, ("text", "prompt"))
    code = text_of(record, ("code",)).replace("\r\n", "\n")
    tests = record["test_list"]
    if not (isinstance(tests, list) and tests):
        raise ValueError("test_list must be a list of tests, such as assert f(1) == 2")
    for source in (*tests, setup_of(record)):
        ast.parse(source)
    prompt = PROMPT.format(text=text.strip(), tests="\n".join(tests)).replace("\r\n", "\n")
    is_test = record.get("task_id") in range(11, 511)  # of MBPP's published test split
    return Row(text, Example(prompt, code, fields=record), is_test)

"""The code task: write Python that passes its tests. minigrpo/sandbox/ runs it, and decides.

`--data` has MBPP's lines as they are published, in the full or the sanitized form. The prompt is
from its paper (arXiv 2108.07732), and the code is the first block of Python in a completion:

    {"task_id": 601, "text": "Write a function to ...", "code": "def ...",
     "test_list": ["assert f(1) == 2", ...], "test_setup_code": ""}

Without `--data`, the questions are one-line functions, described by inputs and outputs:

    prompt       f(0)=42 f(100)=342
                 def f(x):
    completion    return 42+3*x

Two more inputs are tested, so that a table of the examples does not pass. The answers for
supervised fine-tuning are random functions that pass the first example, and are right by chance.
"""

import ast
import re
from collections.abc import Mapping
from textwrap import dedent

import numpy as np

from ..rng import stream
from ..sandbox import run_tests as run_tests
from ..types import Example
from .base import Generated, SourceTask
from .rows import Record, Row, text_field
from .splits import Files, Rows, is_held_out

PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
# a block's language and content; a block without an end was cut off, and is run as it is
BLOCK = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON_LANGUAGES = ("", "python", "python3", "py")

HEAD = "def f(x):"
KINDS = {"line": "x", "square": "x*x"}
SHOWN = (0, 100)  # inputs in the prompt
HIDDEN = (1, 7)  # further inputs that are tested


class Code(SourceTask):
    reward_weights: Mapping[str, float] = {
        "passed": 1.0,  # 1 if all tests of the list pass, else 0
        "tests": 0.5,  # the fraction of them that pass
    }
    success = "passed"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), timeout: float = 3.0
    ) -> None:
        """`timeout` is in seconds of CPU time, for a completion and its tests."""
        self.seed = seed
        self.timeout_s = float(timeout)
        if data or eval_data:
            super().__init__(Rows(seed, data, eval_data, parse_mbpp))
        else:
            super().__init__(Generated(self._one_liner, "one-line functions"))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        fields = example.fields
        code = code_of(text)
        if example.prompt.endswith(HEAD):
            code = HEAD + code
        passed = run_tests(code, fields["test_list"], setup_of(fields), self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}

    def _one_liner(self, number: int, held_out: bool) -> Example:
        split = "held-out" if held_out else "train"
        rng = stream(self.seed, f"one-liners/{split}", number)
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
        answer = f" return {term}+{other_slope}"
        return Example(prompt, answer, number, kind, fields=fields)


def random_function(rng: np.random.Generator) -> tuple[str, int, str]:
    """The kind of a random function of x, its constant term, and the rest of its expression."""
    kind = str(rng.choice([*KINDS]))
    factor, term = rng.integers((1, 0), (10, 100))
    return kind, term, f"{factor}*{KINDS[kind]}"


def code_of(text: str) -> str:
    """The first block of Python after </think>, where drafts end; the whole text without one."""
    text = text.rpartition("</think>")[2]
    # blocks of all languages are found, or the end of one would begin another
    for language, code in BLOCK.findall(text):
        if language.lower() in PYTHON_LANGUAGES:
            return dedent(code) if code.startswith(" ") else code  # a block in a list is indented
    return text


def setup_of(fields: Record) -> str:
    """The code that runs before the tests of an example."""
    imports = fields.get("test_imports") or []
    return "\n".join([*imports, fields.get("test_setup_code") or ""])


def parse_mbpp(record: Record) -> Row:
    """Read a line of MBPP. Raises an error if its tests are not Python."""
    text = text_field(record, ("text", "prompt"))
    code = text_field(record, ("code",)).replace("\r\n", "\n")
    tests = record["test_list"]
    if not (isinstance(tests, list) and tests):
        raise ValueError("test_list must be a list of tests, such as assert f(1) == 2")
    for source in (*tests, setup_of(record)):
        ast.parse(source)
    prompt = PROMPT.format(text=text.strip(), tests="\n".join(tests)).replace("\r\n", "\n")
    is_test = record.get("task_id") in range(11, 511)  # the published test split
    return Row(text, Example(prompt, code, fields=record), is_test)

"""MBPP: a code task of your own, with the published lines. minigrpo/sandbox/ runs it, and decides.

    minigrpo train --config mbpp-2xv100 --data mbpp.jsonl

All tests are in the prompt, so a program that only looks up their answers is paid too: read some.

The lines have the full or the sanitized form. The prompt is from the paper (arXiv 2108.07732), and
the code is the first block of Python in a completion:

    {"task_id": 601, "text": "Write a function to ...", "code": "def ...",
     "test_list": ["assert f(1) == 2", ...], "test_setup_code": ""}
"""

import ast
import re
from collections.abc import Mapping, Sequence
from textwrap import dedent

from minigrpo.tasks.base import Files, Rows
from minigrpo.tasks.code import run_tests
from minigrpo.tasks.rows import Record, Row, text_field
from minigrpo.types import Example

PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
# a block's language and content; a block without an end was cut off, and is run as it is
BLOCK = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON_LANGUAGES = ("", "python", "python3", "py")


class MBPP(Rows):
    """The published test split is held out."""

    reward_weights: Mapping[str, float] = {
        "passed": 1.0,  # 1 if all tests of the list pass, else 0
        "tests": 0.5,  # the fraction of them that pass
    }
    success = "passed"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), timeout: float = 3.0
    ) -> None:
        """`timeout` is in seconds of CPU time, for a completion and its tests."""
        self.timeout_s = float(timeout)
        super().__init__(seed, data, eval_data, parse_mbpp)

    def choose_held_out(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The published test split, unless the files have one side of it."""
        tests = [row for row in rows if row.example.fields.get("task_id") in range(11, 511)]
        return tests if 0 < len(tests) < len(rows) else super().choose_held_out(rows)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        tests = example.fields["test_list"]
        passed = run_tests(code_of(text), tests, setup_of(example.fields), self.timeout_s)
        return {"passed": float(all(passed)), "tests": sum(passed) / len(passed)}


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
    return Row(text, Example(prompt, code, fields=record))

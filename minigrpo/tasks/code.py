"""The code task: write Python that passes its tests.

The model's code runs in processes of its own; minigrpo/sandbox/ says what that holds, and what it
does not. Examples come from MBPP's files (code_data.py) or from a generator (one_liners.py).

    reward = 1 * passed + 0.5 * tests       passed: all tests pass;  tests: the share that passes
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..runtime.flags import ConfigError
from ..sandbox.workers import Sandbox, SandboxError, check_system
from ..types import Example
from .scoring import BatchScored

# language and content; a block that ends with the text was cut off, and is run as it is
BLOCK = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = "", "python", "python3", "py"  # languages of blocks


@cache
def sandbox() -> Sandbox:
    """The workers of this process, which start with the first code to be run."""
    return Sandbox()


def run_tests(
    code: str, tests: Sequence[str], setup: str = "", timeout_s: float = 3.0
) -> list[bool]:
    """Run code in a process of its own, then each test against it; one verdict per test.

    Whatever the code does, a test that does not pass within the time is False, nothing is left
    running, and files outside the code's own folder are unchanged, within the limits that
    minigrpo/sandbox/__init__.py states.

    Args:
        code: a Python program, of any text.
        tests: Python statements, such as `assert f(2) == 5`. They and the setup are trusted.
        setup: statements that run before the tests, such as imports.
        timeout_s: seconds, wall time and CPU time, for all of this together.

    Raises:
        SandboxError: code cannot be run on this system.
    """
    return sandbox().run_tests(code, tests, setup, timeout_s)


def code_of(text: str) -> str:
    """The first block of Python in a completion, or all of it if there is none.

    What comes before </think> are drafts.
    """
    text = text.rpartition("</think>")[2]
    blocks = BLOCK.findall(text)  # of all languages, or the end of one would begin another
    return next((code for language, code in blocks if language.lower() in PYTHON), text)


class CodeTask(BatchScored):
    """Scores completions by running them; the examples come from the subclasses.

    An example's fields are MBPP's: `test_list`, and if it has them `test_setup_code`,
    `test_imports` and `challenge_test_list`. A field `prefix` is code before the completion.

    Reward parts, each in [0, 1]:
        passed: all tests of the list pass; the success of evaluation and pass@k.
        tests: the share of them that pass.
        challenge: the share of the challenge tests, which no prompt shows; NaN without any.
            Measured and not paid.
    """

    parts: Mapping[str, float] = {"passed": 1.0, "tests": 0.5, "challenge": 0.0}
    success = "passed"

    def __init__(self, timeout_s: float = 3.0) -> None:
        """
        Args:
            timeout_s: seconds that a completion and its tests may take.

        Raises:
            ConfigError: code cannot be run on this system.
        """
        try:
            check_system()
        except SandboxError as error:
            raise ConfigError(f"--task code: {error}") from None
        self.timeout_s = timeout_s

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows = [
            self._score(example.fields, text) for example, text in zip(examples, texts, strict=True)
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, len(self.parts)).T
        return dict(zip(self.parts, columns, strict=True))

    def _score(self, fields: Mapping[str, Any], text: str) -> tuple[float, float, float]:
        """The values of `parts` for one completion, in that order."""
        tests, challenge = fields["test_list"], fields.get("challenge_test_list") or []
        verdicts = self._verdicts(fields, [*tests, *challenge], text)
        own, others = verdicts[: len(tests)], verdicts[len(tests) :]
        return float(all(own)), float(np.mean(own)), float(np.mean(others)) if others else np.nan

    def explain(self, example: Example, text: str) -> str:
        """The first test of the list that a completion does not pass."""
        tests = example.fields["test_list"]
        verdicts = self._verdicts(example.fields, tests, text)
        failed = [test for test, passed in zip(tests, verdicts, strict=True) if not passed]
        return f"{len(failed)} of {len(tests)} tests fail: {failed[0]}" if failed else ""

    def _verdicts(self, fields: Mapping[str, Any], tests: Sequence[str], text: str) -> list[bool]:
        code = fields.get("prefix", "") + code_of(text)
        try:
            return run_tests(code, tests, setup_of(fields), self.timeout_s)
        except SandboxError as error:
            raise ConfigError(f"--task code: {error}") from None

    @property
    def about(self) -> str:
        return self.how_code_runs

    @property
    def how_code_runs(self) -> str:
        """What holds the code that is run; starts a worker to find out. Raises ConfigError."""
        try:
            held = sandbox().describe()
        except SandboxError as error:
            raise ConfigError(f"--task code: {error}") from None
        return f"code execution: {held}; at most {self.timeout_s:g} s each"


def setup_of(fields: Mapping[str, Any]) -> str:
    """What runs before the tests of an example."""
    return "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])

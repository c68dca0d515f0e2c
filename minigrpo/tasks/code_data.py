"""MBPP's problems, from its JSONL files as they are published: the full and the sanitized form.

    {"task_id": 601, "text": "Write a function to ...", "code": "def ...", "test_list":
     ["assert f(1) == 2", ...], "test_setup_code": "", "challenge_test_list": []}

The sanitized form has `prompt` in place of `text`, and `test_imports` in place of the setup. The
question is written as in MBPP's paper (arXiv 2108.07732). The published split holds: problems 11 to
510 are held out. A file that has only one side of it is split by a hash of the prompt.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.text import has_lone_surrogate, printable, short
from ..types import Example
from .code import CodeTask, setup_of
from .data_lines import parse_record
from .files import MAX_NAMED, SilentListener
from .pairs import JSONLExamples
from .task_request import TaskRequest

PUBLISHED_TEST = range(11, 511)  # task_id
MOST_RUN = 32  # problems whose own code is run before a run starts
MOST_CHARACTERS = 200  # of a warning about them
FORM = 'must be an object like {"text": "...", "code": "...", "test_list": ["assert ..."]}'
PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)


class CodeData(JSONLExamples, CodeTask):
    """Problems of JSONL files, each with its tests."""

    def __init__(self, request: TaskRequest) -> None:
        """Raises ValueError, in one line, for a line that is no problem with tests."""
        CodeTask.__init__(self, request.timeout_s)
        JSONLExamples.__init__(self, request.paths, request.seed, request.listener, parse)
        if type(request.listener) is not SilentListener:  # nobody would hear it
            self._check_solutions(request)

    def split(self, examples: Sequence[Example]) -> Callable[[Example], bool]:
        if {is_published_test(example) for example in examples} != {True, False}:
            return super().split(examples)
        self.held_out_are = "MBPP's test split, task_id 11 to 510"
        return is_published_test

    @property
    def about(self) -> str:
        """As `CodeTask`, and which problems are held out."""
        return f"{super().about}; {self.how_code_runs}"

    def _check_solutions(self, request: TaskRequest) -> None:
        """Warn if the code of some problems fails their own tests: no completion would be paid.

        Of many problems MOST_RUN are run, evenly spaced, until MAX_NAMED have failed.
        """
        pairs, number = [*self._split[False], *self._split[True]], 0
        failed = list[str]()
        for pair in pairs[:: -(-len(pairs) // MOST_RUN)]:
            number += 1
            if said := self.explain(pair.example, pair.example.answer):
                failed.append(f"{pair.path}, line {pair.line}: {said}")
            if len(failed) == MAX_NAMED:
                break
        if failed:
            request.listener.warn(
                f"--data {request.data}: the code of {len(failed)} of the {number} problems that "
                "were run does not pass their own tests, so no completion can; the first: "
                f"{printable(failed[0])[:MOST_CHARACTERS]}. docs/task-code.md says what code can "
                "use here, and what tests can compare"
            )

    def asks(self, example: Example) -> str:
        """The text of a problem: two may have the same one, and other tests."""
        return str(example.fields.get("text", example.fields.get("prompt"))).strip()


def of_files(request: TaskRequest) -> CodeData:
    """The task of --task code --data FILE.jsonl."""
    return CodeData(request)


def is_published_test(example: Example) -> bool:
    """Whether a problem belongs to MBPP's test split."""
    return example.fields.get("task_id") in PUBLISHED_TEST


def parse(line: str) -> Example:
    """Return the problem of a line. Raises ValueError, which says what is wrong with it."""
    record = parse_record(line, FORM)
    text = _checked_text("text", record.get("text", record.get("prompt")))
    code = _checked_text("code", record.get("code"))
    for name in ("test_list", "challenge_test_list", "test_imports"):
        _check_texts(record, name)
    if not record.get("test_list"):
        raise ValueError(f"{FORM}; test_list has no test")
    if not isinstance(record.get("test_setup_code") or "", str):
        raise ValueError(f"test_setup_code must be text, is {short(record['test_setup_code'])}")
    if not isinstance(record.get("prefix", ""), str):
        raise ValueError(f"prefix must be text, is {short(record['prefix'])}")
    for test in (*record["test_list"], *(record.get("challenge_test_list") or [])):
        _check_python("a test", test)
        if all(isinstance(statement, ast.Pass) for statement in ast.parse(test).body):
            raise ValueError(f"a test tests nothing: {short(test)}")
    _check_python("the setup", setup_of(record))
    prompt = PROMPT.format(text=text.strip(), tests="\n".join(record["test_list"]))
    return Example(prompt.replace("\r\n", "\n"), code.replace("\r\n", "\n"), fields=record)


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{FORM}; {name} is {short(value)}")
    if has_lone_surrogate(value):
        raise ValueError(f"{name} has half of a surrogate pair, which is no character")
    return value


def _check_texts(record: Mapping[str, Any], name: str) -> None:
    values = record.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts, is {short(values)}")


def _check_python(what: str, text: str) -> None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{what} is not Python: {short(text)}") from None

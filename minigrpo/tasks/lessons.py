"""`--task teach` on a file: questions with solutions, as a user's own JSONL or GSM8K's has them.

A line is {"question": "...", "solution": "..."}. Without a solution the `answer` is one, so that
GSM8K's files can be used as published; its calculator annotations, such as <<48/2=24>>, are left
out.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runtime.text import has_lone_surrogate, short
from ..types import Example
from .additions import Additions
from .data_lines import parse_record
from .pairs import JSONLExamples
from .task_request import TaskRequest
from .teach import SHIPPED, Teaching

FORM = 'must be an object like {"question": "...", "solution": "..."}'
ANNOTATION = re.compile("<<.*?>>")
TEACHERS_PROMPT = """\
{question}

Solution:
{solution}

Explain to a student, who knows only the question, how to get to the solution. Write the \
explanation between <think> and </think>.
"""
STUDENTS_PROMPT = """\
{question}

Think between <think> and </think>, then write the solution between <solution> and </solution>."""


# of the shipped models; other teachers write longer explanations
SETTINGS: Mapping[str, Any] = {
    "student": SHIPPED,
    "max_new_tokens": 24,
    "temperature": 0.7,
    "learning_rate": 5e-4,
    "max_steps": 60,
    "eval_every": 20,
}


def offline(request: TaskRequest) -> Additions:
    """The task on seeded additions."""
    return Additions(request.seed, request.student)


def of_files(request: TaskRequest) -> "Lessons":
    """The task on the files of --data."""
    return Lessons(request.paths, request.seed, request.student)


class Lessons(JSONLExamples, Teaching):
    """The task of `--task teach --data FILE.jsonl`."""

    student_prompt = STUDENTS_PROMPT

    def __init__(self, paths: Sequence[Path], seed: int, student: str) -> None:
        """Raises ValueError in one line, for a bad file or no student."""
        Teaching.__init__(self, student)
        JSONLExamples.__init__(self, paths, seed, parse=parse_lesson)

    def asks(self, example: Example) -> str:
        """The question alone: one may have several solutions."""
        return str(example.fields["question"]).strip()


def parse_lesson(text: str) -> Example:
    """Return the example of a JSON line. Raises ValueError that says what is allowed.

    Its answer is empty, because no explanation is the true one.
    """
    record = parse_record(text, FORM)
    question = _text(record, "question")
    key = "answer" if record.get("solution") is None else "solution"
    solution = ANNOTATION.sub("", _text(record, key))
    prompt = TEACHERS_PROMPT.format(question=question, solution=solution)
    return Example(prompt, "", fields={**record, "solution": solution})


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{FORM}; {key} is {short(value)}")
    if has_lone_surrogate(value):
        raise ValueError(f"{key} has half of a surrogate pair, which is no character")
    return value

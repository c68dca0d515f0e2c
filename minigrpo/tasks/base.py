"""Turns --task into a task: a built-in one, a class in a user's file, or an object.

`minigrpo.Task` is the interface of a task. A new built-in task is a module in this folder and
a row in task_table.py.
"""

import copy
import hashlib
import inspect
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..model.chat import INSTRUCTIONS
from ..task import Task
from ..task_table import TASKS
from ..types import ConfigError, Example

Data = str | Sequence[Mapping[str, Any]]  # comma-separated files, or the rows themselves


def load_task(
    task: Any,
    *,
    data: Data = "",
    eval_data: Data = "",
    args: Mapping[str, Any] | None = None,
    **known: Any,
) -> Task:
    """The task of --task, --data, --eval-data and --task-args.

    Args:
        task: a key of TASKS, a Python file with one task, a class, or an object that is made.
        data, eval_data: files, separated by commas, or the rows themselves.
        known: what a class gets only if its `__init__` names it: `seed`; `chat`, whether --system
            makes prompts the messages of a user; `environment`, the `World` or None, which may say
            what a row does not.
    """
    given = {"data": sources(data), "eval_data": sources(eval_data)}
    given = {name: value for name, value in given.items() if value} | dict(args or {})
    if not isinstance(task, str | type):
        if given:
            raise ConfigError(f"--task: an object takes no arguments, got {', '.join(given)}")
        made = copy.copy(task)
        made.__class__ = with_defaults(type(task))
        return made
    cls = class_of(task)
    named = inspect.signature(cls).parameters
    own = {name: x for name, x in known.items() if name in named}
    try:
        return cls(**own, **given)
    except (TypeError, ValueError) as error:  # such as an argument that it does not take
        raise ConfigError(f"--task {task}: {error}") from error


def sources(data: Data) -> list[Any]:
    """The files of --data or --eval-data; rows themselves are one source."""
    if not isinstance(data, str):
        return [data]
    return [Path(name.strip()) for name in data.split(",") if name.strip()]


def class_of(task: str | type) -> type:
    """The class that --task names, one of the user's with all members of `Task`.

    A Python file is run: use only files that you trust.
    """
    if isinstance(task, type):
        return with_defaults(task)
    if task in TASKS:
        return resolve_name(f"{__package__}.{TASKS[task].path}")
    name = f"minigrpo_{Path(task).stem}"
    values = runpy.run_path(task, run_name=name).values() if task.endswith(".py") else ()
    found = [x for x in values if hasattr(x, "train") and getattr(x, "__module__", "") == name]
    if len(found) != 1:
        said = "or a Python file with one class that has a method train"
        raise ConfigError(f"--task must be {', '.join(TASKS)} {said}, got {task}")
    return with_defaults(found[0])


def with_defaults(cls: type) -> type:
    """A task's class, with the members of `Task` that it lacks.

    `index`, the key of an example's random numbers, is its place in the sequence. Scores see copies
    of examples, because code may take numbers out of a list in `fields`.
    """

    class Whole(cls, Task):  # type: ignore[misc]
        def train(self, number: int) -> Example:
            return _numbered(super().train(number), number)

        def held_out(self, number: int) -> Example:
            return _numbered(super().held_out(number), number)

        def score_batch(self, examples: Sequence[Example], texts: Sequence[str]) -> Any:
            return super().score_batch([copy.deepcopy(x) for x in examples], texts)

    return Whole


def _numbered(example: Example, number: int) -> Example:
    prompt = example.prompt or question_of(example.messages)
    return replace(example, index=number, prompt=prompt)


def shipped_model(task: str) -> Path:
    """The file of the SFT model that --model shipped means; chess-env's for a task of one's own."""
    row = TASKS.get(task, TASKS["chess-env"])
    if not row.shipped:
        raise ConfigError(
            f"--model: none ships for --task {task}; give scratch, a run, a folder or ORG/NAME"
        )
    return asset(row.shipped)


def asset(name: str) -> Path:
    """The file of a model that ships."""
    return Path(str(files("minigrpo.assets") / f"{name}.safetensors"))


# --- what tasks share -----------------------------------------------------------------------------


def fingerprint(text: str) -> int:
    """A 64-bit hash of a text, the same in every process (Python's `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def is_held_out(question: str, one_in: int = 10) -> bool:
    """Whether a question is for evaluation.

    It depends on the question alone, not on its place in a file or on the seed: a question that
    occurs twice is never in both splits, and all runs agree on what is held out.
    """
    return fingerprint(question) % one_in == 0


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """The text that stands for messages in logs, and whose hash decides the split.

    Of a single user message it is the content, so that a question is in the same split as a prompt
    and as a message. System messages are left out: the same question with other instructions must
    not be trained on and evaluated too.
    """
    asked = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if len(asked) == 1 and asked[0]["role"] == "user":
        return asked[0]["content"]
    return "\n".join(
        f"{message['role']}: {message['content'] or message.get('tool_calls', '')}"
        for message in asked
    )


def tagged_answer(text: str) -> str | None:
    """What stands between the last <answer> and </answer> of a text; None without them."""
    before, _, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened else None


class Generated(Task):
    """A source of examples without end."""

    def __init__(self, make: Callable[[int, bool], Example], about: str) -> None:
        """`make`: (number, held out?) -> an example, a pure function."""
        self.make, self.about = make, about

    def train(self, number: int) -> Example:
        return self.make(number, False)

    def held_out(self, number: int) -> Example:
        return self.make(number, True)


class SourceTask(Task):
    """A task that has its examples from another one, and adds `parts` and `score`."""

    def ask(self, example: Example) -> Example:
        """The source's example as this task asks it."""
        return example

    def __init__(self, source: Task) -> None:
        """`source`: a generator, or the rows of files (data.py); it scores nothing."""
        self.source, self.about = source, source.about
        self.num_held_out, self.questions = source.num_held_out, source.questions
        self.num_train = source.num_train

    def train(self, number: int) -> Example:
        return self.ask(self.source.train(number))

    def held_out(self, number: int) -> Example:
        return self.ask(self.source.held_out(number))

    def longest(self, number: int) -> Sequence[Example]:
        return [self.ask(example) for example in self.source.longest(number)]

"""Turns --task into a task: a built-in one, a class in a user's file, or an object.

A new built-in task is a module in this folder and a table of tasks.toml.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..defaults import TASKS
from ..model.chat import INSTRUCTIONS
from ..task import Task
from ..types import ConfigError, Example
from ..userfiles import load_file, place_of

Data = str | Sequence[Mapping[str, Any]]  # comma-separated files, or the rows themselves


@dataclass(eq=False)
class Generated(Task):
    """A source of examples without end."""

    make: Callable[[int, bool], Example]  # of (number, held out?), a pure function
    about: str
    speculate: bool = True

    def train(self, number: int) -> Example:
        return self.make(number, False)

    def held_out(self, number: int) -> Example:
        return self.make(number, True)


class SourceTask(Task):
    """A task that has its examples from another one, and adds `parts` and `score`."""

    # of `source`
    inherited: Sequence[str] = ("about", "num_held_out", "num_known", "questions", "speculate")

    def __init__(self, source: Task) -> None:
        """`source`: a generator, or the rows of files (data.py); it scores nothing."""
        self.source = source
        for name in self.inherited:
            setattr(self, name, getattr(source, name))

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Example `number` of a split of the source as this task asks it."""
        return example

    def train(self, number: int) -> Example:
        return self.ask(self.source.train(number), number, "train")

    def held_out(self, number: int) -> Example:
        return self.ask(self.source.held_out(number), number, "held-out")

    def known(self, number: int) -> Example:
        return self.ask(self.source.known(number), number, "known")


class ChangedTask(SourceTask):
    """Another task with all that it says of itself and its scores; only examples are changed."""

    # all attributes and what scores
    inherited = (
        *inspect.get_annotations(Task),
        "score",
        "score_batch",
        "score_tokens",
        "summaries",
    )


class UserTask(ChangedTask):
    """A user's task, whose examples get an `index`, the key of random numbers."""

    def ask(self, example: Example, number: int, split: str) -> Example:
        prompt = example.prompt or question_of(example.messages)
        return replace(example, index=number, prompt=prompt)


def load_task(
    task: str | type[Task] | Task,
    *,
    seed: int = 0,
    data: Data = "",
    eval_data: Data = "",
    chat: bool = False,
    environment: Any = None,
    args: Mapping[str, Any] = {},
) -> Task:
    """The task of --task, --data, --eval-data and --task-args. Raises ConfigError.

    `task` is a key of TASKS, a Python file with one task, a class, or an object. A class gets
    `seed`, `chat` (see `Task`) and `environment` (an EnvironmentSet or None) if it names them.
    """
    given = {"data": sources(data), "eval_data": sources(eval_data)}
    given = {name: value for name, value in given.items() if value} | dict(args)
    if isinstance(task, Task):
        if given:
            raise ConfigError(f"--task: an object takes no arguments, got {', '.join(given)}")
        return UserTask(task)
    cls = class_of(task)
    offered = {"seed": seed, "chat": chat, "environment": environment}
    taken = {name: offered[name] for name in offered.keys() & inspect.signature(cls).parameters}
    try:
        made = cls(**taken, **given)
    except (TypeError, ValueError) as error:  # such as an argument that it does not take
        raise ConfigError(f"--task {task}: {place_of(error)}{error}") from error
    return made if task in TASKS else UserTask(made)


def sources(data: Data) -> list[Any]:
    """The files of --data or --eval-data; rows themselves are one source."""
    if not isinstance(data, str):
        return [data]
    return [Path(name.strip()) for name in data.split(",") if name.strip()]


def class_of(task: str | type[Task]) -> type[Task]:
    """The class that --task names. A Python file is run: use only files that you trust."""
    if isinstance(task, type) and issubclass(task, Task):
        return task
    if task in TASKS:
        return resolve_name(f"{__package__}.{TASKS[task].path}")
    if not (isinstance(task, str) and task.endswith(".py")):
        names = ", ".join(TASKS)
        raise ConfigError(f"--task: {names}, FILE.py or a minigrpo.Task, got {task!r:.80}")
    module = load_file(task)
    classes = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Task) and kind.__module__ == module.__name__  # not an imported one
    ]
    if len(classes) != 1:
        raise ConfigError(f"--task {task}: has {len(classes)} subclasses of minigrpo.Task, not 1")
    return classes[0]


def shipped_model(task: str) -> Path:
    """The file of the SFT model that --model shipped means; chess-env's for a task of one's own."""
    row = TASKS.get(task, TASKS["chess-env"])
    if not row.shipped:
        raise ConfigError(f"--model: none ships for --task {task}; give scratch or a path")
    return Path(__file__).parents[1] / f"assets/{row.shipped}.safetensors"


def fingerprint(text: str) -> int:
    """A 64-bit hash of a text, the same in every process (Python's `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def is_held_out(question: str, one_in: int = 10) -> bool:
    """Whether a question is for evaluation, by its hash alone: copies of it are in one split."""
    return fingerprint(question) % one_in == 0


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """The text that stands for messages in logs: a user's message, or the turns of a dialogue.

    It does not tell prompts apart: `whole_question` of data.py does.
    """
    asked = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if asked and asked[-1]["role"] == "assistant":  # the beginning of the answer
        asked.pop()
    if len(asked) == 1 and asked[0]["role"] == "user":
        return asked[0]["content"]
    return "\n".join(
        f"{message['role']}: {message['content'] or message.get('tool_calls', '')}"
        for message in asked
    )


def tagged_answer(text: str, default: str) -> str:
    """What stands between the last <answer> and </answer> of a text; `default` without them."""
    before = text.rpartition("</answer>")[0]
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened else default

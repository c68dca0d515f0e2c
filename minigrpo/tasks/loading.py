"""The task that --task means: a built-in one, a class in a user's file, or an object."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..errors import refusing
from ..task import Task
from ..types import ConfigError
from ..userfiles import load_file
from .base import WrappedTask

Data = str | Sequence[Mapping[str, Any]]  # comma-separated files, or the rows themselves

# built-in task -> its module here, which is imported on use, and its class
TASKS = {
    "chess-env": "chess_env:ChessEnv",
    "prompts": "prompts:Prompts",
    "gym": "gym:Gym",
    "math": "math:Math",
}


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
    """Make the task of --task, --data, --eval-data and --task-args.

    `task` is a key of TASKS, a Python file with one task, a class, or an object. A class gets
    `seed`, `chat` (see `Task`) and `environment` (an EnvironmentSet or None) if it names them.
    """
    files = {"data": sources(data), "eval_data": sources(eval_data)}
    given = {name: value for name, value in files.items() if value}
    given |= args
    if isinstance(task, Task):
        if given:
            raise ConfigError(f"--task: an object takes no arguments, got {', '.join(given)}")
        return WrappedTask(task)
    task_class = named_class(task)
    offered = {"seed": seed, "chat": chat, "environment": environment}
    named = inspect.signature(task_class).parameters
    taken = {name: value for name, value in offered.items() if name in named}
    with refusing(f"--task {task}, --task-args"):
        inspect.signature(task_class).bind(**taken, **given)
    made = task_class(**taken, **given)
    return made if task in TASKS else WrappedTask(made)


def sources(data: Data) -> list[Any]:
    """The files of --data or --eval-data. A caller's rows are one source."""
    if not isinstance(data, str):
        return [data]
    files = [Path(name.strip()) for name in data.split(",") if name.strip()]
    for file in files:
        if not file.exists():
            advice = "load a data set of the Hub with `datasets`: docs/recipes.md"
            raise ConfigError(f"--data {file}: there is no such file; {advice}")
    return files


def named_class(task: str | type[Task]) -> type[Task]:
    """The class that --task names. A Python file is run, so use only files that you trust."""
    if isinstance(task, type) and issubclass(task, Task):
        return task
    if task in TASKS:
        return resolve_name(f"{__package__}.{TASKS[task]}")
    if not (isinstance(task, str) and task.endswith(".py")):
        names = ", ".join(TASKS)
        forms = f"{names}, FILE.py or a minigrpo.Task"
        raise ConfigError(f"--task must be {forms}, got {task!r:.80}")
    module = load_file(task)
    classes = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Task) and member.__module__ == module.__name__  # not imported
    ]
    if len(classes) != 1:
        found = f"has {len(classes)} subclasses of minigrpo.Task"
        raise ConfigError(f"--task {task}: {found}; leave exactly one in the file")
    return classes[0]

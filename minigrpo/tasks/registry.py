"""Turns --task and --data into a task: a built-in one, a row of TASKS, or one of your own.

The protocol that a task implements is `minigrpo.types.Task`. A new built-in task is a module in
this folder and a row here. own.py runs users' Python files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from ..runtime.flags import ConfigError, job_of
from ..runtime.renamed import modern
from ..types import Task
from . import chess_files, code_data, countdown, hidden_digit, lessons, math, one_liners, pairs, qa
from .chess_files import BEST_MOVE, BOTH, CHESS_ENV
from .countdown import CountdownFiles
from .files import Listener, SilentListener, check_readable
from .own import load_own_task
from .own import load_rewards as load_rewards
from .task_request import TaskRequest
from .teach import TEACH

MakeTask = Callable[[TaskRequest], Task]


@dataclass(frozen=True)
class TaskRow:
    """A built-in task. Its makers raise ValueError, in one line that names the flag or the file."""

    make: MakeTask | None = None  # without --data: on seeded examples; None: it needs files
    read: MakeTask | None = None  # on the files of --data, request.paths; None: it reads none
    endings: Sequence[str] = (".jsonl",)  # how the names of these files may end
    shipped: str = ""  # --init-from shipped is minigrpo/assets/<shipped>.safetensors; "": refused
    # flat name -> value: settings that differ from the defaults, unless somebody gives them; the
    # first without --data, the second with it
    settings: Mapping[str, Any] = field(default_factory=dict)
    data_settings: Mapping[str, Any] = field(default_factory=dict)


CHESS_MODEL = "warm-start"
TASKS: dict[str, TaskRow] = {
    CHESS_ENV: TaskRow(
        make=chess_files.self_play,
        read=chess_files.chess_env,
        endings=tuple(chess_files.READERS),
        shipped=CHESS_MODEL,
    ),
    **{
        name: TaskRow(
            make=chess_files.of_files,
            read=chess_files.of_files,
            endings=tuple(chess_files.READERS),
            shipped=CHESS_MODEL,
        )
        for name in (BEST_MOVE, BOTH)
    },
    "math": TaskRow(
        make=math.sums,
        read=math.of_files,
        shipped="math",
        settings=math.SUMS,
        data_settings=math.PROBLEMS,
    ),
    "prompts": TaskRow(read=pairs.of_files),
    "qa": TaskRow(read=qa.read),
    "hidden-digit": TaskRow(
        make=hidden_digit.make, shipped="hidden-digit", settings=hidden_digit.SETTINGS
    ),
    TEACH: TaskRow(
        make=lessons.offline, read=lessons.of_files, shipped="teacher", settings=lessons.SETTINGS
    ),
    "code": TaskRow(
        make=one_liners.generated,
        read=code_data.of_files,
        shipped="code",
        settings=one_liners.SETTINGS,
    ),
    **{
        f"countdown{suffix}": TaskRow(
            make=partial(countdown.generated, form=form),
            read=partial(CountdownFiles, form=form),
            shipped="countdown" if form == "search" else "",
            settings=countdown.SETTINGS[form],
        )
        for suffix, form in {"": "search", "-expression": "expression", "-chat": "chat"}.items()
    },
}


def load_task(
    name: str, *, seed: int, data: str = "", listener: Listener | None = None, **settings: Any
) -> Task:
    """Return the task of --task and --data.

    Args:
        name: a key of TASKS (or one of their earlier names), or a Python file with one class that
            has `parts`, `train`, `held_out` and `score`; the class is called with the seed.
        data: files of examples, separated by commas; "" for the task's own generator.
        listener: receives reading progress and warnings.
        settings: other fields of `TaskRequest`, such as `history`.

    Raises:
        ValueError: in one line that names the flag.
    """
    name, told = modern_name(name), listener or SilentListener()
    if name.endswith(".py"):
        if data:
            raise ValueError(f"--data goes with {', '.join(TASKS)}, got --task {name}")
        return load_own_task(name, seed, told.warn)
    row = row_of(name)
    request = TaskRequest(name, seed, data, listener=told, **settings)
    if not data:
        if row.make is None:
            raise ConfigError(f"--task {name} needs --data FILE{row.endings[0]}")
        return row.make(request)
    if row.read is None:
        raise ConfigError(f"--task {name} makes its own questions and reads no --data, got {data}")
    try:
        for path in request.paths:  # check all paths first: reading one file may take minutes
            if not str(path).endswith(tuple(row.endings)):
                raise ValueError(
                    f"a file of questions must end with {', '.join(row.endings)}, got {path}"
                )
            check_readable(path)
        return row.read(request)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--data {error}") from None


def row_of(name: str) -> TaskRow:
    """The row of a built-in task. Raises ConfigError for a name that is not in the table."""
    if (row := TASKS.get(modern_name(name))) is None:
        allowed = ", ".join(TASKS)
        raise ConfigError(f"--task must be {allowed} or a Python file (FILE.py), got {name}")
    return row


def modern_name(name: str) -> str:
    """The current name of a task."""
    return str(modern({"task": name})["task"])


def settings_by_task() -> dict[str, Mapping[str, Any]]:
    """What each task changes from the defaults, by flat name; tasks that change nothing are out."""
    found = {name: row.settings for name, row in TASKS.items()}
    for name, row in TASKS.items():
        found[job_of({"task": name, "data": "FILE"})] = row.data_settings
    return {name: settings for name, settings in found.items() if settings}


def shipped_model(task: str) -> str:
    """The file of the model that --init-from shipped means for a task. Raises ConfigError.

    A task of your own has that of chess-env.
    """
    row = TASKS[CHESS_ENV] if task.endswith(".py") else row_of(task)
    if not row.shipped:
        raise ConfigError(
            f"shipped: no model ships for --task {task}; take scratch, or the folder of a model"
        )
    return str(files("minigrpo.assets").joinpath(f"{row.shipped}.safetensors"))

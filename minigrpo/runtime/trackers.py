"""--track: what a run logs also goes to Weights & Biases or to Trackio.

Both have the same interface: init, log, Table, finish. Metrics keep their names in metrics.jsonl;
those of evaluations get the prefix `eval/`, as in TensorBoard, because both have a `reward`. The
samples of a step are a table. What the tracker raises while the run goes ends the tracking, not the
run.
"""

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..config import Config
from .failures import reason_of
from .files import write_whole
from .flags import ConfigError

NONE = "none"
PROJECT = "minigrpo"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another
ID = "track_id"  # file in the run's folder, so that a resume continues the tracker's run
# columns of the table of samples, where a sample has them, besides its prompt and its reward parts
COLUMNS = ("source", "decoding", "completion", "truth", "reward", "advantage", "right")
Say = Callable[[str], object]

# package -> what its init gets besides project, name, config and resume
OPTIONS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "wandb": lambda folder, name: {
        "id": name,
        "dir": str(folder),
        "settings": {"console": "off"},  # it would take the progress bar apart
    },
    "trackio": lambda folder, name: {"embed": False},
}


def check_tracker(config: Config) -> None:
    """Raise ConfigError if the package of --track is not installed."""
    name = config.run.track
    if name != NONE and find_spec(name) is None:
        raise ConfigError(f"--track {name} needs {name}: pip install 'minigrpo[{name}]'")


def start_trackers(config: Config, folder: Path, step: int, warn: Say) -> list["Tracker"]:
    """The tracker of --track, if any, which continues after `step`; after 0 it is a new one.

    Raises ConfigError if it does not start.
    """
    return [] if config.run.track == NONE else [Tracker(config, folder, step, warn)]


class Tracker:
    """A listener of a run's log."""

    def __init__(self, config: Config, folder: Path, step: int, warn: Say) -> None:
        """Raises ConfigError if the tracker does not start, such as without a login."""
        name = config.run.track
        self.name, self.warn, self.failed = name, warn, False
        self.rows: list[dict[str, Any]] = []  # samples of the step `rows_of`
        self.rows_of = step
        try:
            self.package = importlib.import_module(name)
            called = _name(folder, step)
            self.run = self.package.init(
                project=os.environ.get(f"{name.upper()}_PROJECT") or PROJECT,
                name=called,
                config=config.flat(),
                resume="allow",
                **OPTIONS[name](folder, called),
            )
        except Exception as error:
            raise ConfigError(f"--track {name}: does not start ({reason_of(error)})") from None

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"eval/{name}": value for name, value in values.items()})

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Keep a sample until all of its step are there: a table is logged whole."""
        if step != self.rows_of:
            self._log_samples()
        self.rows_of = step
        row: dict[str, Any] = {"prompt": _asked(record)}
        row |= {name: record[name] for name in COLUMNS if name in record}
        for name, score in record.get("parts", {}).items():
            row[f"rewards/{name}" if name in ("prompt", *COLUMNS) else name] = score
        self.rows.append(row)

    def close(self) -> None:
        self._log_samples()
        self._try(lambda: self.package.finish())

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step != self.rows_of:  # trackers take steps in order
            self._log_samples()
        self._try(lambda: self.run.log(dict(values), step=step))

    def _log_samples(self) -> None:
        rows, self.rows = self.rows, []
        if not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        self._try(
            lambda: self.run.log(
                {"samples": self.package.Table(columns=columns, data=data)}, step=self.rows_of
            )
        )

    def _try(self, action: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            action()
        except (Exception, SystemExit) as error:
            self.failed = True
            self.warn(f"--track {self.name}: {reason_of(error)}; training continues untracked")


def _asked(record: Mapping[str, Any]) -> str:
    """The prompt of a sample, or its messages as JSON."""
    return json.dumps(record["messages"]) if "messages" in record else str(record.get("prompt"))


def _name(folder: Path, step: int) -> str:
    """What names this run and no other: made for one that starts, read for one that goes on.

    Of the folder's name only what an id may have is kept.
    """
    file, digits = folder / ID, ""
    if step and file.is_file():
        digits = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{8}", digits):
        digits = uuid4().hex[:8]
        write_whole(file, lambda aside: aside.write_text(digits))
    shown = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
    return f"{shown}-{digits}"

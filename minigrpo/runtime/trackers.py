"""--track: what a run logs also goes to Weights & Biases or to Trackio.

Both have the same interface: init, log, Table, finish. Metrics keep their names in metrics.jsonl;
those of evaluations get the prefix `eval/`, as in TensorBoard, because both have a `reward`. The
samples of a step are a table. What the tracker refuses is lost, and the rest goes on; if it refuses
all, the tracking ends, and not the run.
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
TRACK_ID = "track_id"  # file in the run's folder, so that a resume continues the tracker's run
MOST_FAILURES = 3  # in a row; then the tracking ends, because each of them may take long
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
        self.name, self.warn, self.failures = name, warn, 0  # failures in a row
        self.said = set[str]()  # what kinds of records have failed
        self.rows: list[dict[str, Any]] = []  # samples of the step `rows_of`
        self.rows_of = step
        try:
            self.package = importlib.import_module(name)
            called = _name(folder, step, warn)
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
        self._log("metrics", step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._log("evaluation", step, {f"eval/{name}": value for name, value in values.items()})

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
        self._try("end", self.rows_of, lambda: self.package.finish())

    def _log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if step != self.rows_of:  # trackers take steps in order
            self._log_samples()
        self._try(kind, step, lambda: self.run.log(dict(values), step=step))

    def _log_samples(self) -> None:
        rows, self.rows = self.rows, []
        if not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]

        def log() -> None:
            table = self.package.Table(columns=columns, data=data)
            self.run.log({"samples": table}, step=self.rows_of)

        self._try("samples", self.rows_of, log)

    def _try(self, kind: str, step: int, action: Callable[[], object]) -> None:
        """Have the tracker do something. A kind of record that fails is said once."""
        if self.failures == MOST_FAILURES:
            return
        try:
            action()
            self.failures = 0
        except (Exception, SystemExit) as error:
            self.failures += 1
            said = f"--track {self.name}: {kind} of step {step} not logged ({reason_of(error)})"
            if self.failures == MOST_FAILURES:
                self.warn(f"{said}; training continues untracked")
            elif kind not in self.said:
                self.warn(f"{said}; the rest is tracked, and this is not said twice")
            self.said.add(kind)


def _read(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""


def _asked(record: Mapping[str, Any]) -> str:
    """The prompt of a sample, or its messages as JSON."""
    return json.dumps(record["messages"]) if "messages" in record else str(record.get("prompt"))


def _name(folder: Path, step: int, warn: Say) -> str:
    """What names this run and no other: made for one that starts, read for one that goes on.

    Of the folder's name only what an id may have is kept. The file also says in which folder it
    was written: beside its original, a copy is another run.
    """
    file, found = folder / TRACK_ID, ""
    if step:
        found = _read(file)
    digits, _, home = found.partition("\n")
    original = Path(home.removesuffix("\n")) / TRACK_ID
    if home and _read(original) == found and not file.samefile(original):
        warn(f"{file}: is a copy of {original}; this run is another one in the tracker")
        digits = ""
    if not re.fullmatch("[0-9a-f]{8}", digits):
        digits = uuid4().hex[:8]
    if (text := f"{digits}\n{folder}\n") != found:
        write_whole(file, lambda aside: aside.write_text(text, "utf-8"))
    shown = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
    return f"{shown}-{digits}"

"""A run's logs: JSONL files, TensorBoard, and with --track also Weights & Biases or Trackio.

A log never ends a run: what a full disk or a tracker does not take is lost with a warning. JSON is
strict: a value that is not finite is null.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.utils.tensorboard import SummaryWriter

from ..config import Config
from ..errors import refusing
from ..types import Warn
from .checkpoint import write_text

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
SAMPLES = "samples.jsonl"
HELD_OUT = "held_out.jsonl"  # the answers of the last evaluation, which `minigrpo compare` pairs
LOGS = (METRICS, EVALUATIONS, SAMPLES, HELD_OUT)
LogLine = Mapping[str, Any]  # an object of JSON; `step` is among its keys


def to_json(record: LogLine, indent: int | None = None) -> str:
    """A record as strict JSON, with a line break at the end."""
    strict = json.loads(json.dumps(record), parse_constant=lambda name: None)
    return json.dumps(strict, indent=indent) + "\n"


def read_jsonl(path: Path, warn: Warn = lambda text: None) -> list[dict[str, Any]]:
    """The objects with a step in a log, none if there is no file.

    A damaged line is left out with a warning. The last one may be incomplete: a run is writing it,
    or was killed while it did.
    """
    records = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line and number < len(lines):
            warn(f"{path}, line {number}: damaged, left out")
    return records


def append(path: Path, lines: bytes) -> None:
    """Add lines to a file, all or none of them; they never go on with a line that has no end."""
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            lines = b"\n" + lines
        try:
            while lines:  # a disk that fills up takes a part first
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(size)
            raise


class RunLog:
    """A run's logs. Until `open`, as in all processes but the main one, nothing is written."""

    def __init__(self, warn: Warn, check: Callable[[], object] = lambda: None) -> None:
        """`check`: raises RunFailed if the folder is another run's by now."""
        self.warn = warn
        self.check = check
        self.folder: Path | None = None
        self.charts: dict[str, Any] = {}  # a `Board`, and the run of a tracker, by name
        self.evaluated: list[dict[str, float]] = []  # the lines that eval.jsonl has already
        self.has_warned = False

    def open(self, folder: Path, step: int, base: Path, trackers: Mapping[str, Any]) -> None:
        """Go on in `folder` with the logs of the run in `base`, without lines after `step`."""
        self.folder = folder
        for name in LOGS:
            lines = read_jsonl(base / name, self.warn)
            kept = [line for line in lines if line["step"] <= step]
            write_text(folder / name, "".join(map(to_json, kept)))
            if name == EVALUATIONS:  # where null stands for NaN
                self.evaluated = [
                    {key: math.nan if value is None else value for key, value in line.items()}
                    for line in kept
                ]
        self.charts = dict(trackers)
        try:
            self.charts["tensorboard"] = Board(str(folder / "tensorboard"), purge_step=step + 1)
        except Exception as error:  # a full disk, or a file in the way
            self.warn(f"tensorboard failed, training continues without it ({error})")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write(METRICS, step, [metrics])
        curves = {name if "/" in name else f"train/{name}": metrics[name] for name in metrics}
        self._each_chart(lambda chart: chart.log(curves, step=step))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation, after its samples: a resume takes it as done."""
        self.write(EVALUATIONS, step, [values])
        curves = {f"eval/{name}": value for name, value in values.items()}
        self._each_chart(lambda chart: chart.log(curves, step=step))

    def write(self, name: str, step: int, records: Iterable[LogLine], mode: str = "a") -> None:
        """Write lines to a log; warn of the first that cannot be written."""
        if self.folder is None:
            return
        self.check()
        lines = "".join(to_json({"step": step, **record}) for record in records)
        try:
            if mode == "w":
                write_text(self.folder / name, lines)
            else:
                append(self.folder / name, lines.encode())
        except OSError as error:
            if not self.has_warned:
                self.warn(f"{self.folder}: logs are NOT WRITTEN ({error}); training continues")
            self.has_warned = True

    def close(self) -> None:
        self._each_chart(lambda chart: chart.finish())

    def _each_chart(self, action: Callable[[Any], object]) -> None:
        """Have TensorBoard and the tracker do something; one that fails is not asked again."""
        for name, chart in list(self.charts.items()):
            try:
                action(chart)
            except Exception as error:
                del self.charts[name]
                self.warn(f"{name} failed, training continues without it ({error})")


class Board(SummaryWriter):
    """TensorBoard, with the methods of a tracker's run."""

    finish = SummaryWriter.close

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, step)
        self.flush()


def start_tracker(config: Config, folder: Path) -> dict[str, Any]:
    """The run of --track in wandb or trackio, by its name; a second start continues it."""
    name = config.run.track
    if name == "none":
        return {}
    file = folder / "track_id"  # the name of the run in its tracker, which a resume continues
    track_id = file.read_text("utf-8") if file.exists() else f"{folder.name}-{uuid4().hex[:8]}"
    options = {"id": track_id, "dir": str(folder)} if name == "wandb" else {}
    project = os.environ.get(f"{name.upper()}_PROJECT", "minigrpo")
    with refusing(f"--track {name}"):
        tracked = import_module(name).init(
            project=project, name=track_id, config=config.flat(), resume="allow", **options
        )
    file.write_text(track_id, "utf-8")
    return {name: tracked}

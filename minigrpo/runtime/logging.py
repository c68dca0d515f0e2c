"""A run's logs: JSONL files, TensorBoard, and with --track also Weights & Biases or Trackio.

A log never ends a run: what a full disk or a tracker does not take is lost with a warning. JSON is
strict: a value that is not finite is null, and `num_nonfinite` counts such values in its record.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.utils.tensorboard import SummaryWriter

from ..config import Config
from ..types import ConfigError
from .checkpoint import write_atomically

METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "eval.jsonl", "samples.jsonl"
HELD_OUT = "held_out.jsonl"  # the answers of the last evaluation, which `minigrpo compare` pairs
LOGS = (METRICS, EVALUATIONS, SAMPLES, HELD_OUT)
TRACK_ID = "track_id"  # file with the name of the run in its tracker, so that a resume continues it
NUM_NOT_FINITE = "num_nonfinite"
MOST_FAILURES = 3  # of a tracker in a row; then tracking ends, because each may take long
# keys of a sample that a tracker's table leaves out
NO_COLUMN = ("parts", "messages", "token_ids", "tokens")
Record = dict[str, Any]
Warn = Callable[[str], object]


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as strict JSON, with a line break at the end."""
    count = 0

    def clean(value: Any) -> Any:
        nonlocal count
        if isinstance(value, float) and not math.isfinite(value):
            count += 1
            return None
        if isinstance(value, Mapping):
            return {name: clean(x) for name, x in value.items()}
        return [clean(x) for x in value] if isinstance(value, list | tuple) else value

    cleaned = clean(record) | ({NUM_NOT_FINITE: count} if count else {})
    return json.dumps(cleaned, indent=indent, allow_nan=False) + "\n"


def read_jsonl(path: Path, warn: Warn = lambda text: None) -> list[Record]:
    """The objects in a log. A damaged line is left out with a warning.

    The last line may be incomplete: a run is writing it, or was killed while it did.
    """
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line and number < len(lines):
            warn(f"{path}, line {number}: damaged, left out")
    return records


class AppendedFile:
    """A file that whole lines are appended to."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "ab", buffering=0)

    def append(self, text: str) -> None:
        """Write all of a text or nothing. Raises OSError for a full disk."""
        rest = memoryview(text.encode())
        size = os.fstat(self.file.fileno()).st_size
        try:
            while rest:  # a disk that fills up takes a part without complaint
                rest = rest[self.file.write(rest) :]
        except OSError:
            os.ftruncate(self.file.fileno(), size)
            raise


class RunLog:
    """The logs in a run's folder."""

    def __init__(
        self, folder: Path, config: Config, step: int, warn: Warn, base: Path | None = None
    ) -> None:
        """Open the logs, in which `step` steps are done: lines of later steps are dropped.

        Args:
            base: the run that this one branches from, whose lines are copied.
        """
        self.folder, self.warn, self.has_warned = folder, warn, False
        # a run that starts afresh keeps nothing, not even the evaluation at step 0
        last = step or -1
        kept = {name: _up_to(last, (base or folder) / name, warn) for name in LOGS}
        evaluated = {record["step"] for record in kept[EVALUATIONS]}
        # those of an evaluation that was killed before its own line are made again
        kept[SAMPLES] = [
            x for x in kept[SAMPLES] if x.get("source") == "train" or x["step"] in evaluated
        ]
        if len(kept[METRICS]) < step:
            warn(f"{folder / METRICS}: has {len(kept[METRICS])} of the {step} steps that are done")
        self.evaluated = [_with_nan(record) for record in _last_of_each_step(kept[EVALUATIONS])]
        for name, records in kept.items():
            _replace(folder / name, records)
        self.files = {name: AppendedFile(folder / name) for name in (METRICS, EVALUATIONS, SAMPLES)}
        self.board: SummaryWriter | None = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else 0
        )
        track = config.run.track
        self.tracker = None if track == "none" else Tracker(config, folder, step, warn)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._append(METRICS, {"step": step, **metrics})
        named = {name if "/" in name else f"train/{name}": x for name, x in metrics.items()}
        self._show(step, named)
        if self.tracker:
            self.tracker.log("metrics", step, metrics)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation, after its samples: a resume takes it as done."""
        self._append(EVALUATIONS, {"step": step, **values})
        named = {f"eval/{name}": x for name, x in values.items()}
        shown = {k: x for k, x in named.items() if k != "eval/n" and "/count/" not in k}
        self._show(step, shown)
        if self.tracker:
            self.tracker.log("evaluation", step, named)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]], text: str = "") -> None:
        """Log completions; TensorBoard gets `text` of them."""
        self._append(SAMPLES, *({"step": step, **record} for record in records))
        self._show(step, {}, text)
        if self.tracker and records:
            self.tracker.log_samples(step, records)

    def held_out(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Keep the answers of an evaluation, in place of those of the one before."""
        lines = [{"step": step, **record} for record in records]
        try:
            _replace(self.folder / HELD_OUT, lines)
        except OSError as error:
            self._trouble(error)

    def close(self) -> None:
        for log in self.files.values():
            log.file.close()
        if self.board:
            self.board.close()
        if self.tracker:
            self.tracker.close()

    def _append(self, name: str, *records: Mapping[str, Any]) -> None:
        try:
            self.files[name].append("".join(map(to_json, records)))
        except OSError as error:
            self._trouble(error)

    def _show(self, step: int, values: Mapping[str, float], text: str = "") -> None:
        """Write to TensorBoard's file, which ends once that is not possible."""
        if self.board is None:
            return
        try:
            for name, x in values.items():
                self.board.add_scalar(name, x, step)
            if text:
                self.board.add_text("samples", text, step)
            self.board.flush()
        except OSError as error:
            self.board = None
            self._trouble(error)

    def _trouble(self, error: OSError) -> None:
        if not self.has_warned:
            self.warn(f"{self.folder}: logs are NOT WRITTEN ({error}); training continues")
        self.has_warned = True


class NoLog:
    """The log of all processes but the main one: it does nothing."""

    evaluated: Sequence[Record] = ()

    def warn(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, records: Sequence[Mapping[str, Any]], text: str = "") -> None: ...

    def held_out(self, step: int, records: Iterable[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


def _up_to(last: int, path: Path, warn: Warn) -> list[Record]:
    """The records of a log up to a step."""
    records = read_jsonl(path, warn) if path.exists() else []
    return [x for x in records if isinstance(x.get("step"), int) and x["step"] <= last]


def _replace(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Make records the contents of a log, unless they are."""
    text = "".join(map(to_json, records))
    if (path.read_bytes() if path.exists() else b"") != text.encode():
        write_atomically(path, lambda aside: aside.write_text(text))


def _last_of_each_step(records: Iterable[Record]) -> list[Record]:
    return [record for _, record in sorted({x["step"]: x for x in records}.items())]


def _with_nan(record: Record) -> Record:
    values = {name: math.nan if x is None else x for name, x in record.items()}
    values.pop(NUM_NOT_FINITE, None)
    return values


# --- trackers -------------------------------------------------------------------------------------


def check_tracker(name: str) -> None:
    """Raise ConfigError if the package of --track is not installed."""
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"--track {name} needs {name}: pip install 'minigrpo[{name}]'")


class Tracker:
    """wandb or trackio, which have the same interface. Evaluations get the prefix `eval/`."""

    def __init__(self, config: Config, folder: Path, step: int, warn: Warn) -> None:
        """Continue the tracker's run of this folder after `step`; after 0 it is a new one."""
        name = config.run.track
        self.name, self.warn, self.failures = name, warn, 0
        self.package = import_module(name)
        file = folder / TRACK_ID
        if not step or not file.exists():
            shown = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
            write_atomically(file, lambda aside: aside.write_text(f"{shown}-{uuid4().hex[:8]}"))
        called = file.read_text().strip()
        options: Record = {"embed": False}
        if name == "wandb":  # its console capture would take the progress bar apart
            options = {"id": called, "dir": str(folder), "settings": {"console": "off"}}
        project = os.environ.get(f"{name.upper()}_PROJECT") or "minigrpo"
        settings = config.flat()
        try:
            self.run = self.package.init(
                project=project, name=called, config=settings, resume="allow", **options
            )
        except Exception as error:  # for instance without a login
            raise ConfigError(f"--track {name}: does not start ({error})") from None

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._try(kind, step, lambda: self.run.log(dict(values), step=step))

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log samples as a table with a column per reward function."""
        parts = [{f"rewards/{name}": x for name, x in r.get("parts", {}).items()} for r in records]
        rows = [{**record, **own} for record, own in zip(records, parts, strict=True)]
        columns = [name for name in dict.fromkeys(itertools.chain(*rows)) if name not in NO_COLUMN]
        data = [[row.get(name) for name in columns] for row in rows]

        def log() -> None:
            table = self.package.Table(columns=columns, data=data)
            self.run.log({"samples": table}, step=step)

        self._try("samples", step, log)

    def close(self) -> None:
        self._try("end", 0, lambda: self.package.finish())

    def _try(self, kind: str, step: int, action: Callable[[], object]) -> None:
        """Have the tracker do something; what fails is lost."""
        if self.failures == MOST_FAILURES:
            return
        try:
            action()
            self.failures = 0
        except (Exception, SystemExit) as error:
            self.failures += 1
            end = "; training continues untracked" if self.failures == MOST_FAILURES else ""
            self.warn(f"--track {self.name}: {kind} of step {step} not logged ({error}){end}")

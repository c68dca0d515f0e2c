"""A run as its folder shows it: settings, metrics per step, evaluations, and how it ended.

`report`, `compare` and `doctor` read runs with this, also while a run is going or after it was
killed. What is no number is dropped here, so that nothing else has to look.
"""

import fnmatch
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..model.hf import read_json
from ..runtime.logging import EVALUATIONS, METRICS, read_jsonl
from ..runtime.run_dir import RECORD, SUMMARY
from ..runtime.stats import headline
from ..types import ConfigError

Record = Mapping[str, float]  # a line of metrics.jsonl or eval.jsonl; `step` is among its keys
Warn = Callable[[str], object]
WINDOW = 5  # the start and the end of a run are this part of its steps: a fifth
FEWEST_STEPS = 20  # a shorter run is not judged by its trends


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    folder: Path
    name: str
    config: Config
    metrics: Sequence[Record]  # by step
    evaluations: Sequence[Record] = ()  # by step
    status: str = ""  # how it ended; "" while it is going, or if it was killed
    versions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> str:
        """The measure that evaluations have first: the share of right completions, greedy."""
        return headline(self.evaluations[-1] if self.evaluations else {})

    @property
    def window(self) -> int:
        """The steps in the start and in the end; of a short run, both are all of them."""
        steps = len(self.metrics)
        return steps if steps < FEWEST_STEPS else steps // WINDOW

    def points(self, name: str, *, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """`[n]` steps and `[n]` values of a metric, or of a measure of evaluations, where it is."""
        records = self.evaluations if held_out else self.metrics
        found = [(record["step"], record[name]) for record in records if name in record]
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        return steps, values

    def shares(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`[n]` steps, shares of right answers and numbers of examples, by evaluation."""
        rows = [
            (record["step"], record[name], record["n"])
            for record in self.evaluations
            if 0 <= record.get(name, -1) <= 1 and record.get("n", 0) >= 1
        ]
        steps, values, sizes = np.array(rows, dtype=float).reshape(-1, 3).T
        return steps, values, sizes

    def names(self, pattern: str) -> list[str]:
        """The metrics whose names fit a pattern with *, in order of their first occurrence."""
        found = dict.fromkeys(name for record in self.metrics for name in record)
        return fnmatch.filter(found, pattern)

    def ends(self, name: str) -> tuple[float, float]:
        """The mean of a metric over the first and the last fifth of the steps; 0 if it has none."""
        values = self.points(name)[1]
        start, end = values[: self.window], values[-self.window :]
        return float(start.mean()) if len(start) else 0.0, float(end.mean()) if len(end) else 0.0


def read_run(folder: Path, warn: Warn) -> Run:
    """Read a run's folder. Raises ConfigError if it is none; `warn` gets what is odd."""
    if missing := [name for name in (METRICS, RECORD) if not (folder / name).is_file()]:
        raise ConfigError(f"{folder}: is no run: it has no {missing[0]}")
    config = Config.from_toml(folder / RECORD)
    versions = tomllib.loads((folder / RECORD).read_text(encoding="utf-8")).get("versions", {})
    summary = read_json(folder / SUMMARY)
    metrics, evaluations = (_by_step(folder / x, warn) for x in (METRICS, EVALUATIONS))
    if not (isinstance(versions, dict) and metrics):
        raise ConfigError(f"{folder}: has no steps yet, or {RECORD} is damaged")
    name, status = folder.resolve().name, str(summary.get("status", ""))
    return Run(folder, name, config, metrics, evaluations, status, versions)


def read_runs(folders: Sequence[Path], warn: Warn) -> list[Run]:
    """Read several runs; of folders with one name, the paths are the names."""
    runs = [read_run(folder, warn) for folder in folders]
    names = [run.name for run in runs]
    return [x if names.count(x.name) == 1 else replace(x, name=str(x.folder)) for x in runs]


def _by_step(path: Path, warn: Warn) -> list[Record]:
    """The numbers in a log, one record per step, in order; of two with one step the last counts."""
    found = {}
    for line in read_jsonl(path, warn) if path.exists() else ():
        if type(line.get("step")) is int and is_number(line["step"]):
            found[line["step"]] = {name: x for name, x in line.items() if is_number(x)}
    return [found[step] for step in sorted(found)]


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number that fits in a float."""
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def differing(sides: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a name and its value on each side, where these differ."""
    names = dict.fromkeys(name for side in sides for name in side)
    rows = [[name, *(str(side.get(name, "")) for side in sides)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]

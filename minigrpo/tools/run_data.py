"""A run as its folder shows it: settings, metrics per step, evaluations, and how it ended."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..runtime.accel import pick_device
from ..runtime.flags import ConfigError, flag
from ..runtime.machine import memory_limit_mib
from ..runtime.measures import headline
from ..runtime.settings import RECORD, places, read_record
from .records import Record, is_number, read_object, read_records

WINDOW = 5  # the start and the end of a run are this part of its steps: a fifth
FEWEST_STEPS = 20  # a shorter run is not judged by its trends


@dataclass(frozen=True)
class RunData:
    """What the rules of a diagnosis, a report or a comparison look at."""

    name: str
    settings: Mapping[str, Any]  # by flat name; defaults where the run does not say
    metrics: list[Record]
    evaluations: list[Record] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    memory_limit_mib: float = math.inf  # of this machine, for the run's device

    @property
    def supervised(self) -> bool:
        return self.settings["loss"] == "nll"

    @property
    def success(self) -> str:
        """The measure that its evaluations have first: the share of right completions."""
        return headline(self.evaluations[-1] if self.evaluations else {})

    def series(self, name: str) -> np.ndarray:
        """`[n]` values of a metric, one per logged step; NaN where it is missing or null."""
        found = (record.get(name) for record in self.metrics)
        return np.array([float(x) if is_number(x) else np.nan for x in found])

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """The metrics whose names begin and end like this, in order of their first occurrence."""
        found = dict.fromkeys(name for record in self.metrics for name in record)
        return [name for name in found if name.startswith(prefix) and name.endswith(suffix)]

    def start(self, name: str) -> float:
        """The mean of a metric over the first fifth of the steps; NaN if it was never logged."""
        return mean(self.series(name)[: self.window])

    def end(self, name: str) -> float:
        """The same over the last fifth."""
        return mean(self.series(name)[-self.window :])

    @property
    def is_short(self) -> bool:
        return len(self.metrics) < FEWEST_STEPS

    @property
    def window(self) -> int:
        """The steps in the start and in the end; of a short run, both are all of them."""
        return len(self.metrics) if self.is_short else len(self.metrics) // WINDOW

    @property
    def last_steps(self) -> str:
        """The steps of the end, in words."""
        first, last = self.metrics[-self.window]["step"], self.metrics[-1]["step"]
        return f"step {last}" if first == last else f"steps {first} to {last}"


def mean(values: np.ndarray) -> float:
    """The mean of the values that are numbers; NaN if there are none."""
    found = values[np.isfinite(values)]
    return float(found.mean()) if len(found) else float("nan")


def read_run(folder: Path, warn: Callable[[str], object] = lambda text: None) -> RunData:
    """Read a run's folder, also while the run is going or after it was killed.

    `warn` gets what is odd in its records.

    Raises ConfigError, in one line, for a folder without the records of a run.
    """
    if not (folder / "metrics.jsonl").exists():
        what = "no metrics.jsonl in this folder" if folder.is_dir() else "no such folder"
        raise ConfigError(f"{folder}: {what}, so it is no run")
    metrics = read_records(folder / "metrics.jsonl", warn=warn)
    config = Config()
    if (folder / RECORD).exists():
        config = Config.of(**read_record(Config, folder))
    else:
        warn(f"{folder}: has no {RECORD}, so its settings are taken to be the defaults")
    evaluations = []
    if (folder / "eval.jsonl").exists() and (folder / "eval.jsonl").stat().st_size:
        evaluations = read_records(folder / "eval.jsonl", warn=warn)
    summary = {}
    if (folder / "summary.json").exists():
        summary = read_object(folder / "summary.json")
    name, limit = folder.resolve().name, _memory_limit(config.speed.device)
    return RunData(name, config.flat(), metrics, evaluations, summary, limit)


def _memory_limit(device: str) -> float:
    """MiB of this machine; infinite if it does not have the run's device."""
    try:
        return memory_limit_mib(pick_device(device))
    except ConfigError:
        return math.inf


def differing_settings(runs: Sequence[Path]) -> list[str]:
    """The flags in which runs differ that are said to be one job with several seeds.

    Speed and memory do not count. A run whose settings cannot be read is not compared.
    """
    found = []
    for run in runs:
        with suppress(ConfigError):
            found.append(Config.of(**read_record(Config, run)))
    groups = ("task", "model", "sampling", "loss", "optimizer", "run")
    names = [name for name, (group, _) in places(Config).items() if group in groups]
    apart = [name for name in names if len({repr(one.flat()[name]) for one in found}) > 1]
    return [flag(name) for name in apart if name not in ("seed", "out_dir")]

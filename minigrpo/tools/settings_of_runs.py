"""Runs to compare, in groups: runs of one setting differ in their seed and folders alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..runtime.answers import ANSWERS
from ..runtime.flags import ConfigError, flag
from ..runtime.resume import changed
from ..runtime.settings import RECORD
from ..runtime.toml_files import read_toml
from .records import Record, is_number, read_lines
from .run_data import RunData, read_run

# settings that a comparison of results is not about
BESIDE = {"seed", "out_dir", "resume", "stop_after", "keep_last", "plan", "profile", "track"}
HOWS = ("sampled", "greedy")


@dataclass(frozen=True)
class Run:
    """A run, with the answers of its last evaluation; none if it did not keep them."""

    data: RunData
    folder: Path
    versions: Mapping[str, str]
    answers: Sequence[Record]

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def seed(self) -> int:
        return int(self.data.settings["seed"])

    @property
    def settings(self) -> dict[str, Any]:
        """What its results depend on, besides the seed."""
        return {name: x for name, x in self.data.settings.items() if name not in BESIDE}

    @property
    def files(self) -> dict[str, str]:
        """The digests of its files of --task, --rewards and --data, by flag and name."""
        return {name: x for name, x in self.versions.items() if name.startswith("--")}

    @property
    def examples(self) -> list[str]:
        """What each held-out example was, as a digest."""
        return [str(record["example"]) for record in self.answers]

    @property
    def last_step(self) -> str:
        """The step of the model that gave the answers."""
        return str(self.answers[0]["step"])

    def measures(self, how: str) -> list[str]:
        """The measures of its greedy or its sampled answers; the success comes first."""
        found = dict.fromkeys(name for record in self.answers for name in record[how])
        first = [self.data.success] if self.data.success in found else []
        return [*first, *(name for name in found if name not in first)]

    def values(self, how: str, measure: str, n: int) -> np.ndarray:
        """`[n]` values of the first n examples; NaN where the measure concerns none."""
        found = (record[how].get(measure) for record in self.answers[:n])
        return np.array([float(x) if is_number(x) else np.nan for x in found])

    def median(self, metric: str) -> float:
        """The median of a metric over the steps; NaN if it was never logged."""
        values = self.data.series(metric)
        known = values[np.isfinite(values)]
        return float(np.median(known)) if len(known) else nan


@dataclass(frozen=True)
class Setting:
    """The runs of one setting, by seed."""

    name: str
    runs: Sequence[Run]

    def median(self, metric: str) -> float:
        """The median of its runs' medians; NaN if none of them has one."""
        known = [value for run in self.runs if isfinite(value := run.median(metric))]
        return median(known) if known else nan

    def quartiles(self, metric: str) -> tuple[float, float]:
        """Between which the middle half of the steps of all runs lies; NaN without values."""
        values = np.concatenate([run.data.series(metric) for run in self.runs])
        known = values[np.isfinite(values)]
        low, high = np.percentile(known, (25, 75)) if len(known) else (nan, nan)
        return float(low), float(high)


def read(folder: Path, warn: Callable[[str], object]) -> Run:
    """Read a run. Raises ConfigError in one line for what is no run or is damaged."""
    data = read_run(folder, warn)
    versions: Mapping[str, str] = {}
    if (folder / RECORD).exists():
        versions = read_toml(folder / RECORD, "").get("versions", {})
    answers: list[Record] = []
    file = folder / ANSWERS
    if file.exists():
        answers = read_lines(file)
        for number, record in enumerate(answers, 1):
            if not ("example" in record and all(isinstance(record.get(x), dict) for x in HOWS)):
                raise ConfigError(f"{file}, line {number}: is no answer of this version")
        last = data.evaluations[-1]["step"] if data.evaluations else answers[0]["step"]
        if answers[0]["step"] != last:  # a full disk
            warn(f"{file}: has the answers of step {answers[0]['step']}, not of step {last}")
    return Run(data, folder, versions, answers)


def grouped(runs: Sequence[Run]) -> list[Setting]:
    """The settings of the runs, in the order of their first runs.

    A second run of one setting with the same seed begins a group of its own: perhaps the program or
    the machine is another.
    """
    found: list[list[Run]] = []
    for run in runs:
        fitting = (
            group
            for group in found
            if group[0].settings == run.settings
            and not changed(group[0].files, run.files)
            and run.seed not in {x.seed for x in group}
        )
        if (group := next(fitting, None)) is None:
            found.append([run])
        else:
            group.append(run)
    names = _names(found)
    return [
        Setting(name, sorted(group, key=lambda run: run.seed))
        for name, group in zip(names, found, strict=True)
    ]


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """What the runs of each group are called together: lr-0 and lr-1 are both lr."""
    names = []
    for runs in groups:
        stems = {re.sub(r"[-_]?(seed)?[-_]?\d+$", "", run.name) for run in runs}
        alone = len(runs) == 1
        stem = runs[0].name if alone else stems.pop() if len(stems) == 1 else ""
        names.append(stem or f"{runs[0].name} and {len(runs) - 1} more")
    if len(set(names)) == len(names):
        return names
    return [str(runs[0].folder) for runs in groups]


def differing(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Flag, or software -> its value in each group, where they are not all the same."""
    flat = [group.runs[0].settings for group in settings]
    rows = {flag(name): [str(x.get(name)) for x in flat] for name in flat[0]}
    names = dict.fromkeys(name for group in settings for name in group.runs[0].versions)
    for name in names:
        rows[name] = [str(group.runs[0].versions.get(name, "unknown")) for group in settings]
    return {name: values for name, values in rows.items() if len(set(values)) > 1}

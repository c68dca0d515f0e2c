"""Read the folder of a run, and plot its curves; for `report`, `compare` and `doctor`.

A run may be read while it is going, or after it was killed. Only finite numbers are kept.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from ..config import Config, Group, OnePath
from ..errors import refusing
from ..metrics import SAMPLED, headline
from ..run.logging import EVALUATIONS, METRICS, read_jsonl
from ..run.run_dir import RECORD
from ..runtime.statistics import Estimate, wilson
from ..types import REWARD, ConfigError, Warn

LoggedNumbers = Mapping[str, float]  # of a line of metrics.jsonl or eval.jsonl, with its `step`
EVAL = "eval/"  # begins the names of curves of evaluations, as in TensorBoard
MOST_POINTS = 100  # of a curve; points beyond that are averaged with their neighbours
OVERVIEW_COLUMNS = ("", "steps", "held out, at first", "at last", "s/step", "peak MiB")


class RunArguments(Group):
    """What all commands on runs take."""

    runs: Annotated[tuple[OnePath, ...], tyro.conf.Positional, Field(min_length=1)]
    """Folders of runs."""

    def read(self, warn: Warn) -> list["Run"]:
        return [read_run(folder, warn) for folder in self.runs]


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Config
    metrics: Sequence[LoggedNumbers]  # by step
    evaluations: Sequence[LoggedNumbers]  # by step
    versions: dict[str, object]  # of software and of the files that it uses

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def success(self) -> str:
        """The headline of evaluations: the share of right completions, greedy, or REWARD."""
        return headline(self.evaluations[-1] if self.evaluations else {})

    @property
    def shares(self) -> list[Estimate]:
        """The headline of each evaluation, sampled; a share has Wilson's interval."""
        sampled = self.success + SAMPLED
        estimates = []
        for record in self.evaluations:
            if sampled in record:
                value = record[sampled]
                is_share = self.success != REWARD and 0 <= value <= 1 <= record.get("n", 0)
                estimates.append(wilson(value, record["n"]) if is_share else Estimate(value))
        return estimates

    def curve(self, name: str) -> dict[float, float]:
        """A metric by step; with EVAL before its name, a measure of the evaluations."""
        measure = name.removeprefix(EVAL)
        records = self.metrics if name == measure else self.evaluations
        return {record["step"]: record[measure] for record in records if measure in record}

    def overview(self) -> list[str]:
        """The cells of OVERVIEW_COLUMNS; the costs are medians."""
        held_out = [str(share) for share in self.shares] or [""]
        costs = [self.curve(name).values() for name in ("step_time", "memory/peak_mib")]
        medians = [f"{median(cost or [math.nan]):.3g}" for cost in costs]
        return [self.name, str(self.metrics[-1]["step"]), held_out[0], held_out[-1], *medians]


def read_run(folder: Path, warn: Warn) -> Run:
    """Read a run's folder. Raises ConfigError if it is none; `warn` hears of damaged lines."""
    metrics = [*map(finite_numbers, read_jsonl(folder / METRICS, warn))]
    evaluations = [*map(finite_numbers, read_jsonl(folder / EVALUATIONS, warn))]
    if not metrics:
        raise ConfigError(f"{folder}: is no run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    versions = tomllib.loads((folder / RECORD).read_text("utf-8")).get("versions", {})
    return Run(folder, config, metrics, evaluations, versions)


def finite_numbers(record: object) -> dict[str, float]:
    """The finite numbers in a JSON object that fit in a float, by key; none in any other value."""
    pairs = record.items() if isinstance(record, dict) else ()
    return {name: x for name, x in pairs if type(x) in (int, float) and -1e300 < x < 1e300}


def differing(sides: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Rows of a name and its value on each side, where these differ."""
    names = dict.fromkeys(name for side in sides for name in side)
    rows = [[name, *(str(side.get(name, "")) for side in sides)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def plot_curve(
    labelled: Mapping[str, Sequence[Run]],
    name: str,
    out: str | StringIO,
    xlabel: str = "training step",
    title: str = "",
) -> None:
    """Draw a curve into a file, or as SVG: for each label the mean of its runs, and their range.

    With a title, it shows shares in percent. A label that begins with "control" is grey.
    """
    with refusing("curves need matplotlib: pip install 'minigrpo[report]'"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for label, runs in labelled.items():
        curves = [run.curve(name) for run in runs]
        shared_steps = sorted(set.intersection(*map(set, curves)))
        pieces = [piece for piece in np.array_split(shared_steps, MOST_POINTS) if len(piece)]
        values = [[curve[step] for step in piece for curve in curves] for piece in pieces]
        steps = [piece.mean() for piece in pieces]
        color = "0.55" if label.startswith("control") else None
        (line,) = axes.plot(steps, [np.mean(x) for x in values], ".-", label=label, color=color)
        ends = [min(x) for x in values], [max(x) for x in values]
        axes.fill_between(steps, *ends, alpha=0.2, color=line.get_color())
    axes.set(title=title or name, xlabel=xlabel)
    if title:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    if len(labelled) > 1:
        axes.legend()
    with matplotlib.rc_context({"savefig.format": "svg", "svg.fonttype": "none"}):
        figure.savefig(out, dpi=200)

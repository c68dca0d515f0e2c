"""Read the folder of a run, and draw its curves; for `report`, `compare` and `doctor`.

A run may be read while it is going, or after it was killed. Values that are not finite numbers are
dropped here, so that nothing else has to look.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tyro
from pydantic import Field

from ..config import Config, Group
from ..errors import refusing
from ..metrics import SAMPLED, headline
from ..run.console import Console
from ..run.logging import EVALUATIONS, METRICS, read_jsonl
from ..run.run_dir import RECORD
from ..runtime.statistics import Estimate, wilson
from ..types import REWARD, ConfigError, Warn

Record = Mapping[str, float]  # a line of metrics.jsonl or eval.jsonl; `step` is among its keys
EVAL = "eval/"  # begins the names of curves of evaluations, as in TensorBoard
MOST_POINTS = 100  # of a curve; points beyond that are averaged with their neighbours
ENDS = ("", "steps", "held out, at first", "at last", "s/step", "peak MiB")


class RunArguments(Group):
    """What all commands on runs take."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, Field(min_length=1)]
    """Folders of runs."""


def runs_of(
    kind: type, argv: Sequence[str], prog: str, about: str | None
) -> tuple[Any, Console, list["Run"]]:
    """The flags of a command on runs, where it prints, and the runs."""
    arguments: Any = tyro.cli(kind, args=argv, prog=prog, description=about)
    console = Console()
    return arguments, console, [read_run(folder, console.warn) for folder in arguments.runs]


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    folder: Path
    config: Config
    metrics: Sequence[Record]  # by step
    evaluations: Sequence[Record]  # by step
    versions: dict[str, Any]  # of software

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
        found = list[Estimate]()
        for record in self.evaluations:
            if (x := record.get(self.success + SAMPLED)) is not None:
                is_share = self.success != REWARD and 0 <= x <= 1 <= record.get("n", 0)
                found.append(wilson(x, record["n"]) if is_share else Estimate(x))
        return found

    def curve(self, name: str) -> dict[float, float]:
        """A metric by step; with EVAL before its name, a measure of the evaluations."""
        measure = name.removeprefix(EVAL)
        records = self.metrics if name == measure else self.evaluations
        return {x["step"]: x[measure] for x in records if measure in x}

    def ends(self) -> list[str]:
        """The cells of ENDS: first and last sampled evaluation, and the medians of the cost."""
        held_out = [str(share) for share in self.shares] or [""]
        costs = [self.curve(name).values() for name in ("step_time", "memory/peak_mib")]
        medians = [f"{median(cost or [math.nan]):.3g}" for cost in costs]
        return [self.name, str(self.metrics[-1]["step"]), held_out[0], held_out[-1], *medians]


def read_run(folder: Path, warn: Warn) -> Run:
    """Read a run's folder. Raises ConfigError if it is none; `warn` hears of damaged lines."""
    logs = [map(numbers, read_jsonl(folder / name, warn)) for name in (METRICS, EVALUATIONS)]
    metrics, evaluations = ([record for record in log if "step" in record] for log in logs)
    if not metrics:
        raise ConfigError(f"{folder}: is no run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    versions = tomllib.loads((folder / RECORD).read_text("utf-8")).get("versions", {})
    return Run(folder, config, metrics, evaluations, versions)


def numbers(record: object) -> dict[str, float]:
    """The finite numbers in a JSON object that fit in a float, by key; none in any other value."""
    pairs = record.items() if isinstance(record, dict) else ()
    return {name: x for name, x in pairs if type(x) in (int, float) and -1e300 < x < 1e300}


def differing(sides: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a name and its value on each side, where these differ."""
    names = dict.fromkeys(name for side in sides for name in side)
    rows = [[name, *(str(side.get(name, "")) for side in sides)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def draw(settings: Mapping[str, Sequence[Run]], name: str, out: str | StringIO) -> None:
    """Draw a curve into a file, or as SVG: for each setting, the mean over its runs.

    The band is the range of the runs, and of the steps that a point is made of.
    """
    with refusing("curves need matplotlib: pip install 'minigrpo[report]'"):
        import matplotlib
        from matplotlib.figure import Figure
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for label, runs in settings.items():
        curves = [run.curve(name) for run in runs]
        steps = sorted(set.intersection(*map(set, curves)))
        points = []
        for part in filter(len, np.array_split(steps, MOST_POINTS)):
            found = [curve[step] for step in part for curve in curves]
            points.append((part.mean(), np.mean(found), min(found), max(found)))
        x, y, low, high = np.array(points).reshape(-1, 4).T
        axes.plot(x, y, ".-", label=label)
        axes.fill_between(x, low, high, alpha=0.2)  # in the colour of the line
    axes.set(title=name, xlabel="step")
    axes.grid(alpha=0.3)
    if len(settings) > 1:
        axes.legend()
    with matplotlib.rc_context({"savefig.format": "svg", "svg.fonttype": "none"}):
        figure.savefig(out, dpi=200)

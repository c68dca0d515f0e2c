"""Read the folder of a run, and draw its curves; for `report`, `compare` and `doctor`.

A run may be read while it is going, or after it was killed. Values that are not finite numbers are
dropped here, so that nothing else has to look.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tyro
from pydantic import Field

from ..config import Config, Group
from ..runtime.console import Console
from ..runtime.logging import EVALUATIONS, METRICS, read_jsonl
from ..runtime.run_dir import RECORD
from ..runtime.stats import SAMPLED, Estimate, headline, wilson
from ..types import REWARD, ConfigError

Record = Mapping[str, float]  # a line of metrics.jsonl or eval.jsonl; `step` is among its keys
Warn = Callable[[str], object]
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
    evaluations: Sequence[Record] = ()  # by step
    versions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def success(self) -> str:
        """The headline of evaluations: the share of right completions, greedy, or REWARD."""
        return headline(self.evaluations[-1] if self.evaluations else {})

    def curve(self, name: str, *, held_out: bool = False) -> dict[float, float]:
        """The values of a metric, or of a measure of the evaluations, by step."""
        records = self.evaluations if held_out else self.metrics
        return {record["step"]: record[name] for record in records if name in record}

    def shares(self, name: str) -> dict[float, Estimate]:
        """The share of right answers by step, with Wilson's intervals; {} for other measures."""
        if name.removesuffix(SAMPLED) != self.success or self.success == REWARD:
            return {}
        sizes, values = (self.curve(key, held_out=True) for key in ("n", name))
        return {
            step: wilson(x, sizes[step]) if 0 <= x <= 1 and sizes.get(step) else Estimate(x)
            for step, x in values.items()
        }

    def ends(self) -> list[str]:
        """The cells of ENDS: first and last sampled evaluation, and the medians of the cost."""
        name = self.success + SAMPLED
        means = {step: Estimate(x) for step, x in self.curve(name, held_out=True).items()}
        shares = [str(share) for share in (means | self.shares(name)).values()] or [""]
        curves = [self.curve(name) for name in ("step_time", "memory/peak_mib")]
        costs = [f"{median(curve.values() or [math.nan]):.3g}" for curve in curves]
        return [self.name, str(self.metrics[-1]["step"]), shares[0], shares[-1], *costs]


def read_run(folder: Path, warn: Warn) -> Run:
    """Read a run's folder. Raises ConfigError if it is none; `warn` hears of damaged lines."""
    metrics, evaluations = (_by_step(folder / name, warn) for name in (METRICS, EVALUATIONS))
    if not metrics:
        raise ConfigError(f"{folder}: is no run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    versions = tomllib.loads((folder / RECORD).read_text(encoding="utf-8")).get("versions", {})
    return Run(folder, config, metrics, evaluations, versions)


def _by_step(path: Path, warn: Warn) -> list[Record]:
    """The numbers in a log, one record per step, in order; of two with one step the last counts."""
    found = {}
    for line in read_jsonl(path, warn):
        if is_number(line.get("step")):
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


def draw(
    settings: Mapping[str, Sequence[Run]], name: str, out: Path | StringIO, *, held_out: bool
) -> None:
    """Draw a metric by step into a file, or as SVG: for each setting, the mean over its runs.

    The band is the range of the runs and of the steps that a point is made of; for a single run's
    share of right answers, it is the 95 % interval.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("curves need matplotlib: pip install 'minigrpo[report]'") from None
    figure = Figure(figsize=(5, 3))
    axes = figure.add_axes((0.14, 0.15, 0.84, 0.76))
    for number, (label, runs) in enumerate(settings.items()):
        curves = [run.curve(name, held_out=held_out) for run in runs]
        shares = runs[0].shares(name) if held_out and len(runs) == 1 else {}
        steps = sorted(set.intersection(*map(set, curves)))
        points = []
        for part in np.array_split(steps, MOST_POINTS):
            values = [curve[step] for curve in curves for step in part]
            ends = [x for step in part if step in shares for x in astuple(shares[step])] or values
            if values:
                points.append((part.mean(), np.mean(values), min(ends), max(ends)))
        x, y, low, high = np.array(points, dtype=float).reshape(-1, 4).T
        axes.plot(x, y, ".-", color=f"C{number}", label=label)
        axes.fill_between(x, low, high, color=f"C{number}", alpha=0.2)
    axes.set(title=name, xlabel="step")
    axes.grid(alpha=0.3)
    if len(settings) > 1:
        axes.legend(framealpha=0.5)
    try:
        with matplotlib.rc_context({"savefig.format": "svg", "svg.fonttype": "none"}):
            figure.savefig(out, dpi=200)
    except ValueError as error:  # no format that matplotlib knows
        raise ConfigError(f"{out}: {error}") from None

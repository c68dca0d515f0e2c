"""Compare the learning curves of runs: a table on the terminal, and a figure.

minigrpo curves runs/a runs/b --out curves.png
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from ..runtime.flags import ConfigError, exit_with, parse

FORMATS = (".png", ".svg", ".pdf")
METRICS = {
    "exact_sampled": "held-out examples exactly right, sampled",
    "exact": "held-out examples exactly right, greedy",
}

Records = Sequence[Mapping[str, Any]]  # the evaluations of a run, as eval.jsonl has them


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path | None = None
    """Write a figure here (PNG, SVG or PDF); needs matplotlib."""
    metric: str = "exact_sampled"
    """What the figure shows: a key of eval.jsonl."""
    pool: bool = False
    """Draw the runs NAME-0, NAME-1, ... as one line: their mean, with their range shaded."""
    difference: bool = False
    """Add a panel with the difference of each run from the first."""
    kinds: bool = False
    """Also show the last evaluation by kind of question, pooled over the runs."""


def read(run: Path) -> Records:
    """The evaluations of a run. Raises ConfigError if there are none."""
    try:
        records = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run}: no readable eval.jsonl ({error})") from None
    if not records:
        raise ConfigError(f"{run}: eval.jsonl is empty")
    return records


def table(runs: Mapping[Path, Records]) -> Table:
    """The first and the last evaluation, sampled and greedy exact-match, one row per run."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("run", overflow="fold", min_width=8)  # names fold, figures do not
    ends = "after", "change"
    for name in ("steps", "sampled\nbefore", *ends, "greedy\nbefore", *ends, "seconds"):
        out.add_column(name, justify="right", no_wrap=True)
    for run, records in runs.items():
        first, last = records[0], records[-1]
        shares = []
        for metric in ("exact_sampled", "exact"):
            before, after = first.get(metric, nan), last.get(metric, nan)
            shares += [f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f}"]
        out.add_row(run.name, str(last["step"]), *shares, f"{_seconds(run):.0f}")
    return out


def _seconds(run: Path) -> float:
    """How long a run took; NaN if it has not ended."""
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    return float(summary.get("wall_seconds", nan))


def table_of_kinds(runs: Mapping[Path, Records]) -> Table:
    """Greedy exact-match before and after by kind of question, pooled over the runs."""
    out = Table()
    out.add_column("kind")
    for name in ("n", "before", "after"):
        out.add_column(name, justify="right")
    ends = [(records[0], records[-1]) for records in runs.values()]
    counted = {name for _, last in ends for name in last if name.startswith("count/")}
    for kind in sorted(name.removeprefix("count/") for name in counted):
        count = sum(last.get(f"count/{kind}", 0) for _, last in ends)
        shares = [
            sum(end[i].get(f"exact/{kind}", 0) * end[i].get(f"count/{kind}", 0) for end in ends)
            / count
            for i in (0, 1)
        ]
        out.add_row(kind, f"{count:.0f}", *(f"{share:.0%}" for share in shares))
    return out


def pooled(runs: Mapping[Path, Records]) -> dict[str, list[Records]]:
    """Runs by name without the trailing number: grpo-0 and grpo-1 are both grpo."""
    out: dict[str, list[Records]] = {}
    for run, records in runs.items():
        out.setdefault(re.sub(r"-\d+$", "", run.name), []).append(records)
    return out


def points(runs: Sequence[Records], metric: str) -> dict[int, list[float]]:
    """Percentages by step, one per run that was evaluated at that step."""
    out: dict[int, list[float]] = {}
    for records in runs:
        for record in records:
            out.setdefault(record["step"], []).append(100 * record[metric])
    return dict(sorted(out.items()))


def draw(
    lines: Mapping[str, Sequence[Records]], metric: str, out: Path, *, difference: bool = False
) -> None:
    """Draw one line per name: the mean of its runs, with their range shaded.

    With `difference`, a second panel shows the difference from the first line. The first and the
    last evaluation are marked, because they use more examples.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--out needs matplotlib: pip install 'minigrpo[plots]'") from None
    matplotlib.use("Agg")  # draws into files, and needs no display
    from matplotlib import pyplot as plt

    ratios = [3, 1] if difference else [1]
    size = (7, 4 + difference)
    options: dict[str, Any] = {"layout": "constrained", "sharex": True, "squeeze": False}
    figure, panels = plt.subplots(len(ratios), figsize=size, height_ratios=ratios, **options)
    axes, bottom = panels[0, 0], panels[-1, 0]
    first: dict[int, float] = {}
    for name, runs in lines.items():
        found = points(runs, metric)
        x, y = list(found), [mean(values) for values in found.values()]
        label = f"{name}: {y[0]:.1f} → {y[-1]:.1f}"
        (line,) = axes.plot(x, y, linewidth=1.4, label=label)
        axes.plot([x[0], x[-1]], [y[0], y[-1]], "o", color=line.get_color())
        low, high = ([end(values) for values in found.values()] for end in (min, max))
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        first = first or dict(zip(x, y, strict=True))
        if difference:
            steps = [step for step in x if step in first]
            apart = [value - first[step] for step, value in zip(x, y, strict=True) if step in first]
            bottom.plot(steps, apart, linewidth=1.2, color=line.get_color())
    if difference:
        bottom.set(ylabel="difference, points")
    axes.set(ylabel=f"{METRICS.get(metric, metric)}, %")
    bottom.set(xlabel="step")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=140)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    try:
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo curves")
        if arguments.out and arguments.out.suffix not in FORMATS:
            raise ConfigError(f"--out must end with {', '.join(FORMATS)}, got {arguments.out}")
        if not arguments.runs:
            raise ConfigError("minigrpo curves needs the folder of at least one run")
        runs = {run: read(run) for run in arguments.runs}
        for run, records in runs.items():
            if arguments.out and any(arguments.metric not in record for record in records):
                there = ", ".join(sorted(records[0].keys() - {"step", "n"}))
                raise ConfigError(f"--metric {arguments.metric}: {run} has only {there}")
        console = Console()
        console.print(table(runs))
        if arguments.kinds:
            console.print(table_of_kinds(runs))
        if arguments.out:
            lines = pooled(runs) if arguments.pool else {run.name: [runs[run]] for run in runs}
            draw(lines, arguments.metric, arguments.out, difference=arguments.difference)
            console.print(f"wrote {arguments.out}")
    except ConfigError as error:
        exit_with(error)


if __name__ == "__main__":
    main()

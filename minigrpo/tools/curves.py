"""Compare the learning curves of runs: a table on the terminal, and a figure.

minigrpo curves runs/a runs/b --out curves.png
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..runtime.flags import ConfigError, did_you_mean, parse
from ..runtime.logging import Screen
from ..runtime.measures import EXACT, SAMPLED, headline
from ..runtime.outputs import check_output_file, write_output
from .messages import one_line_errors
from .records import is_number, read_object, read_records

FORMATS = (".png", ".svg", ".pdf")
MISSING = "-"
Records = Sequence[Mapping[str, Any]]  # the evaluations of a run, as eval.jsonl has them


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path | None = None
    """Write a figure here (PNG, SVG or PDF); needs matplotlib."""
    metric: str = ""
    """What the figure shows: a key of eval.jsonl. Empty: the sampled success of the first run."""
    pool: bool = False
    """Draw the runs NAME-0, NAME-1, ... as one line: their mean, with their range shaded."""
    difference: bool = False
    """Add a panel with the difference of each run from the first."""
    kinds: bool = False
    """Also show the last evaluation by kind of question, pooled over the runs."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told without reading a run."""
        if not self.runs:
            raise ConfigError("minigrpo curves needs the folder of at least one run")
        if self.out is not None:
            check_output_file("--out", self.out, FORMATS)
        elif self.pool or self.difference or self.metric:
            raise ConfigError("--metric, --pool and --difference go with --out")


def read(run: Path) -> Records:
    """The evaluations of a run. Raises ConfigError, in one line, if they cannot be read."""
    if not (run / "eval.jsonl").exists():
        what = "no eval.jsonl in this folder" if run.is_dir() else "no such folder"
        raise ConfigError(f"{run}: {what}, so it is no run that was evaluated")
    return read_records(run / "eval.jsonl", only_numbers=True)


def label_of(metric: str) -> str:
    """What a metric of an evaluation is called beside the figure."""
    how = "sampled" if metric.endswith(SAMPLED) else "greedy"
    name = metric.removesuffix(SAMPLED)
    return f"held-out examples exactly right, {how}" if name == EXACT else metric


def check_metric(run: Path, records: Records, metric: str) -> None:
    """Raise ConfigError unless the metric has a value in some evaluation."""
    if any(value(record, metric) is not None for record in records):
        return
    there = sorted({name for record in records for name, x in record.items() if is_number(x)})
    names = [name for name in there if name not in ("step", "n")]
    hint = did_you_mean(metric, names).removesuffix("; --help lists what is allowed")
    raise ConfigError(f"--metric {metric}: {run} has only {', '.join(names)}{hint}")


def value(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric of an evaluation, or None if it is missing, null or not finite."""
    found = record.get(metric)
    return float(found) if is_number(found) and isfinite(found) else None


def names_of(runs: Sequence[Path]) -> dict[Path, str]:
    """A label for each run: its folder's name, or its path where two folders have one name."""
    names = {run: run.resolve().name for run in runs}
    taken = list(names.values())
    return {run: name if taken.count(name) == 1 else str(run) for run, name in names.items()}


def table(runs: Mapping[Path, Records], seconds: Mapping[Path, float | None]) -> Table:
    """The first and the last evaluation, the success sampled and greedy, one row per run."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("run", overflow="fold", min_width=8)  # names fold, figures do not
    ends = "after", "change"
    for name in ("steps", "sampled\nbefore", *ends, "greedy\nbefore", *ends, "seconds"):
        out.add_column(name, justify="right", no_wrap=True)
    names = names_of(list(runs))
    for run, records in runs.items():
        first, last = records[0], records[-1]
        shares, success = [], headline(last)
        for metric in (success + SAMPLED, success):
            shares += change(value(first, metric), value(last, metric))
        label = Text(names[run])  # as Text, because brackets in it are no markup
        took = seconds[run]
        shares.append(MISSING if took is None else f"{took:.0f}")
        out.add_row(label, str(last["step"]), *shares)
    return out


def change(before: float | None, after: float | None) -> list[str]:
    """Two shares as percentages, and their difference in points."""
    cells = [MISSING if x is None else f"{x:.1%}" for x in (before, after)]
    if before is None or after is None:
        return [*cells, MISSING]
    return [*cells, f"{100 * (after - before):+.1f}"]


def seconds_of(run: Path, screen: Screen) -> float | None:
    """How long a run took; None if it has not ended, or if its summary cannot be read."""
    path = run / "summary.json"
    try:
        summary = read_object(path) if path.exists() else {}
    except ConfigError as error:
        screen.warn(f"{error}; its seconds are not known")
        return None
    return value(summary, "wall_seconds")


def table_of_kinds(runs: Mapping[Path, Records]) -> Table:
    """The greedy success before and after by kind of question, pooled over the runs."""
    out = Table()
    out.add_column("kind")
    for name in ("n", "before", "after"):
        out.add_column(name, justify="right")
    ends = [(records[0], records[-1]) for records in runs.values()]
    counted = {name for _, last in ends for name in last if name.startswith("count/")}
    for kind in sorted(name.removeprefix("count/") for name in counted):
        shares, counts = [], [0.0, 0.0]
        for i in (0, 1):
            hits = 0.0
            for end in ends:
                names = (f"count/{kind}", f"{headline(end[i])}/{kind}")
                count, share = (value(end[i], name) for name in names)
                if count is not None and share is not None:
                    counts[i] += count
                    hits += count * share
            shares.append(f"{hits / counts[i]:.0%}" if counts[i] else MISSING)
        out.add_row(Text(kind), f"{counts[1]:.0f}", *shares)
    return out


def pooled(runs: Mapping[Path, Records]) -> dict[str, list[Records]]:
    """Runs by name without the trailing number: grpo-0 and grpo-1 are both grpo."""
    out: dict[str, list[Records]] = {}
    names = names_of(list(runs))
    for run, records in runs.items():
        out.setdefault(re.sub(r"-\d+$", "", names[run]), []).append(records)
    return out


def points(runs: Sequence[Records], metric: str) -> dict[int, list[float]]:
    """Percentages by step, one per run that has a value at that step."""
    out: dict[int, list[float]] = {}
    for records in runs:
        for record in records:
            if (found := value(record, metric)) is not None:
                out.setdefault(record["step"], []).append(100 * found)
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
        # a leading space, because matplotlib hides labels that begin with an underscore
        shown = name.replace("$", r"\$")
        label = f" {shown}: {y[0]:.1f} → {y[-1]:.1f}"
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
    axes.set(ylabel=f"{label_of(metric)}, %")
    bottom.set(xlabel="step")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_output("--out", out, lambda path: figure.savefig(path, dpi=140))
    plt.close(figure)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        compare(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo curves"))


def compare(arguments: Arguments) -> None:
    """Print the tables and draw the figure. Raises ConfigError in one line."""
    arguments.check()
    screen, runs = Screen(has_result=True), {run: read(run) for run in arguments.runs}
    metric = arguments.metric or headline(next(iter(runs.values()))[-1]) + SAMPLED
    for run, records in runs.items():
        if arguments.out:
            check_metric(run, records, metric)
    console = Console()
    console.print(table(runs, {run: seconds_of(run, screen) for run in runs}))
    if arguments.kinds:
        console.print(table_of_kinds(runs))
    if arguments.out:
        names = names_of(list(runs))
        lines = pooled(runs) if arguments.pool else {names[run]: [runs[run]] for run in runs}
        draw(lines, metric, arguments.out, difference=arguments.difference)
        screen.say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

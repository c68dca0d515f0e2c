"""Compare the learning curves of runs: a table on the terminal, and a figure.

minigrpo curves runs/a runs/b --out curves.png
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from rich.console import Console

from ..runtime.flags import ConfigError, did_you_mean, parse
from ..runtime.logging import Screen
from ..runtime.measures import EXACT, PASS_AT, SAMPLED, headline
from ..runtime.outputs import check_output_file, write_output
from .curve_tables import Records, names_of, other_examples, table, table_of_kinds, value
from .messages import one_line_errors
from .records import read_object, read_records
from .run_data import differing_settings

FORMATS = (".png", ".svg", ".pdf")


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


def read(run: Path, warn: Callable[[str], object] = lambda text: None) -> Records:
    """The evaluations of a run. Raises ConfigError, in one line, if they cannot be read."""
    if not (run / "eval.jsonl").exists():
        what = "no eval.jsonl in this folder" if run.is_dir() else "no such folder"
        raise ConfigError(f"{run}: {what}, so it is no run that was evaluated")
    return read_records(run / "eval.jsonl", only_numbers=True, warn=warn)


def label_of(metric: str) -> str:
    """What a metric of an evaluation is called beside the figure."""
    how = "sampled" if metric.endswith(SAMPLED) else "greedy"
    name = metric.removesuffix(SAMPLED)
    return f"held-out examples exactly right, {how}" if name == EXACT else metric


def is_share(metric: str, record: Mapping[str, Any]) -> bool:
    """Whether a metric counts right completions, so that it is drawn in per cent."""
    success = headline(record)
    shares = metric.removesuffix(SAMPLED) == success or metric.startswith(f"{success}/")
    return shares or metric.startswith(PASS_AT)


def check_metric(run: Path, records: Records, metric: str) -> None:
    """Raise ConfigError unless the metric has a value in some evaluation."""
    have = {name for record in records for name in record if value(record, name) is not None}
    if metric in have:
        return
    names = sorted(have - {"step", "n"})
    if any(metric in record for record in records):
        others = f"; others have: {', '.join(names)}" if names else ""
        raise ConfigError(f"--metric {metric}: {run} has no finite value of it{others}")
    hint = did_you_mean(metric, names).removesuffix("; --help lists what is allowed")
    there = f"only {', '.join(names)}" if names else "no metric with a finite value"
    raise ConfigError(f"--metric {metric}: {run} has {there}{hint}")


def seconds_of(run: Path, screen: Screen) -> float | None:
    """How long a run took; None if it has not ended, or if its summary cannot be read."""
    path = run / "summary.json"
    try:
        summary = read_object(path) if path.exists() else {}
    except ConfigError as error:
        screen.warn(f"{error}; its seconds are not known")
        return None
    return value(summary, "wall_seconds")


def pooled(runs: Mapping[Path, Records]) -> dict[str, list[Records]]:
    """Runs by name without the trailing number: grpo-0 and grpo-1 are both grpo."""
    folders = pooled_folders(list(runs)).items()
    return {name: [runs[run] for run in group] for name, group in folders}


def pooled_folders(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """The folders that are pooled under each name."""
    out: dict[str, list[Path]] = {}
    for run, name in names_of(runs).items():
        out.setdefault(re.sub(r"-\d+$", "", name), []).append(run)
    return out


def points(runs: Sequence[Records], metric: str) -> dict[int, list[float]]:
    """Percentages by step, one per run, at the steps at which all runs have a value."""
    found = _values(runs, metric)
    return {step: values for step, values in found.items() if len(values) == len(runs)}


def _values(runs: Sequence[Records], metric: str) -> dict[int, list[float]]:
    """Percentages by step, one per run that has a value there."""
    out: dict[int, list[float]] = {}
    for records in runs:
        for record in records:
            if (found := value(record, metric)) is not None:
                out.setdefault(record["step"], []).append(100 * found)
    return dict(sorted(out.items()))


def check_common_steps(
    lines: Mapping[str, Sequence[Records]],
    metric: str,
    warn: Callable[[str], object],
    *,
    by: str = "--pool",
) -> None:
    """Warn of runs drawn as one line that have values at different steps.

    Raises ConfigError, whose message begins with `by`, if they have no step in common.
    """
    for name, runs in lines.items():
        every, common = _values(runs, metric), points(runs, metric)
        if not common:
            raise ConfigError(f"{by}: the runs of {name} have no evaluated step in common")
        if len(common) < len(every):
            warn(
                f"{name}: its {len(runs)} runs have {len(common)} of {len(every)} evaluated steps "
                "in common; only these are drawn"
            )


def draw(
    lines: Mapping[str, Sequence[Records]],
    metric: str,
    out: Path,
    *,
    difference: bool = False,
    by: str = "--out",
) -> None:
    """Draw one line per name: the mean of its runs, with their range shaded.

    With `difference`, a second panel shows the difference from the first line. The first and the
    last evaluation are marked, because they use more examples. `by` is the flag of the file.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"{by} needs matplotlib: pip install 'minigrpo[plots]'") from None
    matplotlib.use("Agg")  # draws into files, and needs no display
    from matplotlib import pyplot as plt

    ratios = [3, 1] if difference else [1]
    size = (7, 4 + difference)
    options: dict[str, Any] = {"layout": "constrained", "sharex": True, "squeeze": False}
    figure, panels = plt.subplots(len(ratios), figsize=size, height_ratios=ratios, **options)
    axes, bottom = panels[0, 0], panels[-1, 0]
    first: dict[int, float] = {}
    shares = is_share(metric, next(iter(lines.values()))[0][-1])
    unit, factor, digits = (", %", 1.0, 1) if shares else ("", 0.01, 3)  # points are percentages
    for name, runs in lines.items():
        found = {step: [factor * x for x in xs] for step, xs in points(runs, metric).items()}
        x, y = list(found), [mean(values) for values in found.values()]
        # a leading space, because matplotlib hides labels that begin with an underscore
        shown = name.replace("$", r"\$")
        label = f" {shown}: {y[0]:.{digits}f} → {y[-1]:.{digits}f}"
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
        bottom.set(ylabel="difference, points" if shares else "difference")
    axes.set(ylabel=f"{label_of(metric)}{unit}")
    bottom.set(xlabel="step")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_output(by, out, lambda path: figure.savefig(path, dpi=140))
    plt.close(figure)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        compare(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo curves"))


def compare(arguments: Arguments) -> None:
    """Print the tables and draw the figure. Raises ConfigError in one line."""
    arguments.check()
    screen = Screen(has_result=True)
    runs = {run: read(run, screen.warn) for run in arguments.runs}
    metric = arguments.metric or headline(next(iter(runs.values()))[-1]) + SAMPLED
    for run, records in runs.items():
        if arguments.out:
            check_metric(run, records, metric)
    console = Console(width=screen.console.width)
    console.print(table(runs, {run: seconds_of(run, screen) for run in runs}))
    for words in other_examples(runs):
        screen.say(words, wrap=True)
    if arguments.kinds:
        console.print(table_of_kinds(runs))
    if arguments.out:
        names = names_of(list(runs))
        lines = pooled(runs) if arguments.pool else {names[run]: [runs[run]] for run in runs}
        check_common_steps(lines, metric, screen.warn)
        for name, folders in pooled_folders(list(runs)).items() if arguments.pool else ():
            if differ := ", ".join(differing_settings(folders)):  # such as lr-1e-4 and lr-1e-5
                screen.warn(f"{name}: is drawn as one line, but its runs differ in {differ}")
        draw(lines, metric, arguments.out, difference=arguments.difference)
        screen.say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

"""Learning curves of one or several runs: a table on the terminal, and a figure.

python -m minigrpo.tools.curves runs/a runs/b --out curves.png
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from ..runtime.flags import ConfigError, exit_with, parse

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path | None = None
    """Write a figure here (PNG, SVG or PDF); needs matplotlib."""
    metric: str = "exact"
    """What is drawn, a key of eval.jsonl."""
    difference: bool = False
    """Also draw, below, how far the other runs are from the first."""
    kinds: bool = False
    """Also show the last evaluation by kind of question, pooled over the runs."""


def read(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run. Raises ConfigError if there are none."""
    try:
        records = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run}: no readable eval.jsonl ({error})") from None
    if not records:
        raise ConfigError(f"{run}: eval.jsonl is empty")
    return records


def table(runs: dict[Path, list[dict[str, Any]]]) -> Table:
    """Before and after, a row a run."""
    out = Table()
    for name in (
        "run",
        "steps",
        "n",
        "exact before",
        "after",
        "change",
        "valid before",
        "after",
        "seconds",
    ):
        out.add_column(name, justify="left" if name == "run" else "right", no_wrap=name == "run")
    for run, records in runs.items():
        first, last = records[0], records[-1]
        summary = (
            json.loads((run / "summary.json").read_text())
            if (run / "summary.json").exists()
            else {}
        )
        out.add_row(
            run.name,
            str(last["step"]),
            f"{last['n']:.0f}",
            *(
                f"{first['exact']:.1%}",
                f"{last['exact']:.1%}",
                f"{100 * (last['exact'] - first['exact']):+.1f}",
            ),
            *(
                f"{first.get('valid', float('nan')):.1%}",
                f"{last.get('valid', float('nan')):.1%}",
                f"{summary.get('wall_seconds', float('nan')):.0f}",
            ),
        )
    return out


def table_of_kinds(runs: dict[Path, list[dict[str, Any]]]) -> Table:
    """Greedy exact-match by kind of question, before and after, all runs together."""
    out = Table()
    for name in ("kind", "n", "before", "after"):
        out.add_column(name, justify="left" if name == "kind" else "right")
    ends = [(records[0], records[-1]) for records in runs.values()]
    for kind in sorted(
        {
            name.removeprefix("count/")
            for _, last in ends
            for name in last
            if name.startswith("count/")
        }
    ):
        count = sum(last.get(f"count/{kind}", 0) for _, last in ends)
        shares = [
            sum(end[i].get(f"exact/{kind}", 0) * end[i].get(f"count/{kind}", 0) for end in ends)
            / count
            for i in (0, 1)
        ]
        out.add_row(kind, f"{count:.0f}", *(f"{share:.0%}" for share in shares))
    return out


def draw(
    runs: dict[Path, list[dict[str, Any]]], metric: str, out: Path, difference: bool = False
) -> None:
    """A line a run; the ends, evaluated on more examples, are marked. Below, if asked for: each run
    less the first one.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--out needs matplotlib: pip install 'minigrpo[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ratios = [3, 1] if difference else [1]
    figure, panels = plt.subplots(
        len(ratios),
        figsize=(7, 4 + difference),
        layout="constrained",
        sharex=True,
        squeeze=False,
        height_ratios=ratios,
    )
    axes, bottom = panels[0, 0], panels[-1, 0]
    first: dict[int, float] = {}
    for run, records in runs.items():
        x, y = [record["step"] for record in records], [100 * record[metric] for record in records]
        (line,) = axes.plot(x, y, linewidth=1.2, label=f"{run.name}: {y[0]:.1f} → {y[-1]:.1f}")
        axes.plot([x[0], x[-1]], [y[0], y[-1]], "o", color=line.get_color())
        first = first or dict(zip(x, y, strict=True))
        if difference:
            both = [
                (step, value - first[step])
                for step, value in zip(x, y, strict=True)
                if step in first
            ]
            bottom.plot(*zip(*both, strict=True), linewidth=1.2, color=line.get_color())
    if difference:
        bottom.set(ylabel="difference, points")
    axes.set(ylabel=f"{metric}, % of held-out examples")
    bottom.set(xlabel="step")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=140)


def main() -> None:
    try:
        arguments = parse(Arguments, description=__doc__, prog="python -m minigrpo.tools.curves")
        if arguments.out and arguments.out.suffix not in FORMATS:
            raise ConfigError(f"--out must end with {', '.join(FORMATS)}, got {arguments.out}")
        runs = {run: read(run) for run in arguments.runs}
        console = Console()
        console.print(table(runs))
        if arguments.kinds:
            console.print(table_of_kinds(runs))
        if arguments.out:
            draw(runs, arguments.metric, arguments.out, arguments.difference)
            console.print(f"wrote {arguments.out}")
    except ConfigError as error:
        exit_with(error)


if __name__ == "__main__":
    main()

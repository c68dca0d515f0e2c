"""Make the pictures and the tables of results in docs/: `python benchmarks/figures.py NAME ..`.

NAME is a row of figures.toml. Its runs go to runs/figures/NAME-...; one that was stopped goes on.
Then the table is printed, after what `minigrpo compare` says of the runs. Start this in the
checkout's folder.
"""

import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import tyro
from pydantic import BaseModel

from minigrpo.metrics import SAMPLED
from minigrpo.tools.cli import run_command
from minigrpo.tools.runs import EVAL, Run, plot_curve, read_run


class Setting(BaseModel, frozen=True):
    """Runs that differ in their seed alone; figures.toml explains the fields."""

    name: str
    label: str = ""
    flags: str = ""
    seeds: tuple[int, ...] = ()


class Row(BaseModel):
    minutes: int
    flags: str
    runs: tuple[Setting, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    across: dict[str, str] = {"": ""}
    columns: dict[str, str] = {"sampled, %": "eval/SUCCESS_sampled", "greedy, %": "eval/SUCCESS"}
    before: bool = True
    picture: str = ""
    script: str = ""


Runs = Mapping[tuple[str, Setting], Sequence[Run]]  # by column of a grid, and setting


def main(names: tyro.conf.Positional[tuple[str, ...]] = (), max_steps: int = 0) -> None:
    """Make the pictures and the tables of results in docs/.

    Args:
        names: rows of figures.toml; without any, lists them with their minutes on two CPU cores.
        max_steps: a quick try: so many steps of one seed, with evaluations of 32 examples. It
            leaves docs/ as it is.
    """
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    if not names:
        print(*(f"{row['minutes']:4} min  {name}" for name, row in rows.items()), sep="\n")
    folder = Path("runs/figures", f"{max_steps}-steps" if max_steps else "")
    for name in names:
        row = Row(**rows[name])
        runs = train(name, row, max_steps, folder)
        words = [run.name for same in runs.values() for run in same] + ["--pool"]
        run_command("compare", words, "minigrpo compare")
        out = (folder if max_steps else Path("docs")) / f"{name}.png"
        first = next(iter(runs.values()))
        if row.picture:
            labelled = {setting.label: same for (_, setting), same in runs.items()}
            plot_curve(labelled, EVAL + first[0].success + SAMPLED, str(out), title=row.picture)
        if row.script:
            command = [sys.executable, row.script, *[run.name for run in first], "--out", str(out)]
            subprocess.run(command, check=True)
        print(table(row, runs), flush=True)


def train(name: str, row: Row, max_steps: int, folder: Path) -> Runs:
    """Train what has not finished, one run after another; return all runs."""
    pairs = [(column, setting) for column in row.across for setting in row.runs]
    seeds = slice(1 if max_steps else None)
    jobs = [(*pair, n) for pair in pairs for n in (pair[1].seeds or row.seeds)[seeds]]
    runs = defaultdict[tuple[str, Setting], list[Run]](list)
    for number, (column, setting, seed) in enumerate(jobs, 1):
        parts = (name, column.replace(", ", "-"), setting.name, str(seed))
        out_dir = folder / "-".join(filter(None, parts))
        flags = f"{row.flags} {row.across[column]} {setting.flags} --seed {seed}"
        if max_steps:
            flags += f" --max-steps {max_steps} --eval-every {max_steps // 4} --eval-size 32"
        print(f"\n{name}, run {number} of {len(jobs)}: {flags}", flush=True)
        words = [word.replace("RUNS", str(folder)) for word in flags.split()]
        words += ["--out-dir", str(out_dir), "--resume", "auto"]
        run_command("train", words, "minigrpo train")
        run = read_run(out_dir, print)
        if len(run.metrics) < run.config.run.max_steps:
            sys.exit(f"{out_dir} was stopped; start this again to go on")
        runs[column, setting].append(run)
    return runs


def table(row: Row, runs: Runs) -> str:
    """The results in Markdown; a cell has the lowest and the highest of its seeds."""
    cells = defaultdict[str, dict[str, str]](dict)  # by label and heading
    for (column, setting), same in runs.items():
        for heading, measure in row.columns.items() if setting.label else ():
            curves = [run.curve(measure.replace("SUCCESS", run.success)) for run in same]
            values = [[*curve.values()] for curve in curves if curve]
            ends = {"before": [x[0] for x in values]} if row.before and EVAL in measure else {}
            ends[setting.label] = [x[-1] if EVAL in measure else median(x) for x in values]
            for label, numbers in ends.items():
                extremes = min(numbers), max(numbers)
                texts = [f"{100 * x:.1f}" if "%" in heading else f"{x:.3f}" for x in extremes]
                place = ", ".join(filter(None, (column, heading)))
                cells[label].setdefault(place, "-".join(dict.fromkeys(texts)))  # one "before"
    headings = [*dict.fromkeys(heading for line in cells.values() for heading in line)]
    lines = [[f"seeds {', '.join(map(str, row.seeds))}", *headings], ["---"] * (1 + len(headings))]
    lines += [[label, *(line.get(x, "") for x in headings)] for label, line in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    tyro.cli(main)

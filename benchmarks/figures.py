"""Make the pictures and the tables of results in docs/: `python benchmarks/figures.py NAME ..`.

NAME is a figure of figures.toml. Start this in the checkout's folder: its runs go to runs/figures/.
An interrupted run resumes. The table comes after what `minigrpo compare` says of the runs.
"""

import json
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
from minigrpo.run.logging import EVAL, Run, read_run
from minigrpo.run.run_dir import SUMMARY
from minigrpo.tools.cli import run_command
from minigrpo.tools.report import plot_curve


class Arm(BaseModel, frozen=True):
    """Runs that differ in their seed alone; figures.toml explains the fields."""

    name: str
    label: str = ""
    flags: str = ""
    seeds: tuple[int, ...] = ()


class Figure(BaseModel):
    minutes: int
    flags: str
    runs: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    grid: dict[str, str] = {"": ""}
    columns: dict[str, str] = {"sampled, %": "eval/SUCCESS_sampled", "greedy, %": "eval/SUCCESS"}
    before: bool = True
    picture: str = ""
    script: str = ""


Runs = Mapping[tuple[str, Arm], Sequence[Run]]  # runs of a column of the grid and an arm


def main(names: tyro.conf.Positional[tuple[str, ...]] = (), max_steps: int = 0) -> None:
    """Make the pictures and the tables of results in docs/.

    Args:
        names: of figures.toml; without any, lists them with their minutes on two CPU cores.
        max_steps: quick check: only this many steps of one seed, with evaluations of 32 examples.
            It leaves docs/ as it is.
    """
    figures = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    if not names:
        print(*(f"{figure['minutes']:4} min  {name}" for name, figure in figures.items()), sep="\n")
    folder = Path("runs/figures", f"{max_steps}-steps" if max_steps else "")
    for name, figure in {name: Figure(**figures[name]) for name in names}.items():
        runs = train(name, figure, max_steps, folder)
        words = [run.name for same in runs.values() for run in same] + ["--pool"]
        run_command("compare", words, "minigrpo compare")
        out = (folder if max_steps else Path("docs")) / f"{name}.png"
        first = next(iter(runs.values()))
        if figure.picture:
            labelled = {arm.label: same for (_, arm), same in runs.items()}
            measure = EVAL + first[0].success + SAMPLED
            xlabel = "training step (bands: from the lowest to the highest seed)"
            plot_curve(labelled, measure, str(out), xlabel, figure.picture)
        if figure.script:
            words = [sys.executable, figure.script, *[run.name for run in first], "--out", str(out)]
            subprocess.run(words, check=True)
        print(table(figure, runs), flush=True)


def train(name: str, figure: Figure, max_steps: int, folder: Path) -> Runs:
    """Train what has not finished, one run after another; return those with labels."""
    pairs = [(column, arm) for column in figure.grid for arm in figure.runs]
    seeds = slice(1 if max_steps else None)
    jobs = [(*pair, n) for pair in pairs for n in (pair[1].seeds or figure.seeds)[seeds]]
    runs = defaultdict[tuple[str, Arm], list[Run]](list)
    for number, (column, arm, seed) in enumerate(jobs, 1):
        parts = (name, column.replace(", ", "-"), arm.name, str(seed))
        out_dir = folder / "-".join(filter(None, parts))
        flags = f"{figure.flags} {figure.grid[column]} {arm.flags} --seed {seed}"
        if max_steps:
            flags += f" --max-steps {max_steps} --eval-every {max_steps // 4} --eval-size 32"
        print(f"\n{name}, run {number} of {len(jobs)}: {flags}", flush=True)
        words = f"{flags} --out-dir {out_dir} --resume auto".replace("RUNS", str(folder)).split()
        run_command("train", words, "minigrpo train")
        summary = json.loads((out_dir / SUMMARY).read_text("utf-8"))
        if summary["status"] != "finished":  # it may lack its last evaluation alone
            sys.exit(f"{out_dir} was stopped; start this again to go on")
        runs[column, arm].append(read_run(out_dir))
    return {(column, arm): same for (column, arm), same in runs.items() if arm.label}


def table(figure: Figure, runs: Runs) -> str:
    """The results in Markdown: in each cell the lowest and the highest of its seeds."""
    cells = defaultdict[str, dict[str, str]](dict)  # by label and heading
    for (column, arm), same in runs.items():
        for measure, series in figure.columns.items():
            curves = [[*run.curve(series.replace("SUCCESS", run.success)).values()] for run in same]
            heading = ", ".join(filter(None, (column, measure)))
            is_evaluated = series.startswith(EVAL)
            if figure.before and is_evaluated:  # all arms start alike: the first one is enough
                cells["before"].setdefault(heading, span([curve[0] for curve in curves], measure))
            results = [curve[-1] if is_evaluated else median(curve) for curve in curves]
            cells[arm.label][heading] = span(results, measure)
    headings = [*dict.fromkeys(heading for row in cells.values() for heading in row)]
    rows = [["", *headings], ["---"] * (1 + len(headings))]
    rows += [[label, *(row.get(x, "") for x in headings)] for label, row in cells.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def span(values: Sequence[float], measure: str) -> str:
    ends = min(values), max(values)
    texts = [f"{100 * x:.1f}" if "%" in measure else f"{x:.3f}" for x in ends]
    return "-".join(dict.fromkeys(texts))


if __name__ == "__main__":
    tyro.cli(main)

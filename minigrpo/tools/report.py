"""Write a page about runs: results, findings, curves, settings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that loads nothing else. The curves are figures of matplotlib (extra `report`);
report.html.j2 is the page, and jinja2 escapes every text of a run. Several runs share each figure.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

import tyro
from jinja2 import Template

from ..config import Config, OnePath
from ..run.console import Console
from ..run.logging import SAMPLES, LogLine, read_jsonl
from ..types import Warn
from .doctor import diagnose
from .runs import EVAL, OVERVIEW_COLUMNS, Run, RunArguments, differing, plot_curve

Figures = dict[str, list[str]]  # section -> SVGs
MOST_SAMPLES = 24  # groups of a run's training, and held-out prompts: the last ones
# section -> its curves, each in the first that matches; SUCCESS is the headline of evaluations
PANELS = {
    "Held out": ("eval/SUCCESS_sampled", "eval/SUCCESS", "eval/*"),
    "Training": ("reward", "rewards/*", "completions/*", "entropy", "kl"),
    "Cost": ("step_time", "time/*", "memory/*"),
    "Also logged": ("*",),
}


def figures_of(runs: Sequence[Run]) -> Figures:
    """The figures of each section, without curves that are missing or always 0."""
    figures: Figures = {}
    by_name = {run.name: [run] for run in runs}
    undrawn = dict.fromkeys(curve for run in runs for curve in curves_of(run))
    for section, patterns in PANELS.items():
        for pattern in patterns:
            success_named = pattern.replace("SUCCESS", runs[0].success)
            for curve in fnmatch.filter([*undrawn], success_named):
                del undrawn[curve]  # it has one figure
                svg = StringIO()
                plot_curve(by_name, curve, svg)
                figures.setdefault(section, []).append(svg.getvalue())
    return figures


def curves_of(run: Run) -> Iterator[str]:
    """The names of a run's curves, as `Run.curve` takes them, once for each value but 0."""
    for prefix, log in (("", run.metrics), (EVAL, run.evaluations)):
        for line in log:
            for name, value in line.items():
                if value and name not in ("step", "n"):
                    yield prefix + name


def samples_of(run: Run, warn: Warn) -> dict[str, list[list[LogLine]]]:
    """The last groups of training, and held-out prompts with their answers over the run."""
    lines = read_jsonl(run.folder / SAMPLES, warn)
    last_groups = {}
    # prompts of equal texts may have different messages
    for source, keys in (("train", ["step"]), ("held_out", ["index", "prompt", "messages"])):
        groups: dict[str, list[LogLine]] = {}
        for line in lines:
            if line.get("source") == source:
                groups.setdefault(str([line.get(key) for key in keys]), []).append(line)
        last_groups[source] = [*groups.values()][-MOST_SAMPLES:]
    return last_groups


def render(runs: Sequence[Run], figures: Figures, warn: Warn) -> str:
    settings = [run.config.flat() | run.versions for run in runs]
    template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    return Template(template, autoescape=True, trim_blocks=True).render(
        runs=runs,
        columns=OVERVIEW_COLUMNS,
        overviews=[run.overview() for run in runs],
        diagnose=diagnose,
        samples=[samples_of(run, warn) for run in runs],
        figures=figures,
        changed=differing([Config().flat(), *settings]),
    )


class Arguments(RunArguments):
    out: OnePath = Path("report.html")
    """The page."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    runs = arguments.read(console.warn)
    arguments.out.write_text(render(runs, figures_of(runs), console.warn), "utf-8", "replace")
    console.say(f"wrote {arguments.out}")

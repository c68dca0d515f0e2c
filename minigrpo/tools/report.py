"""Write a page about runs: results, findings, curves, settings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that loads nothing else. The curves are figures of matplotlib (extra `report`);
report.html.j2 is the page, and jinja2 escapes every text of a run. Several runs share each figure.
"""

import fnmatch
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from jinja2 import Template

from ..config import Config
from ..run.logging import SAMPLES, Record, read_jsonl
from ..types import Warn
from .doctor import diagnose
from .runs import ENDS, EVAL, Run, RunArguments, differing, draw, runs_of

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
    found: Figures = {}
    settings = {run.name: [run] for run in runs}
    names = dict.fromkeys(
        prefix + name
        for run in runs
        for prefix, log in (("", run.metrics), (EVAL, run.evaluations))
        for record in log
        for name in record
        if record[name] and name not in ("step", "n")
    )
    for section, panels in PANELS.items():
        for pattern in panels:
            for name in fnmatch.filter([*names], pattern.replace("SUCCESS", runs[0].success)):
                del names[name]  # a metric has one figure
                draw(settings, name, out := StringIO())
                found.setdefault(section, []).append(out.getvalue())
    return found


def samples_of(run: Run, warn: Warn) -> dict[str, list[list[Record]]]:
    """The last groups of training, and held-out prompts with their answers over the run."""
    records = read_jsonl(run.folder / SAMPLES, warn)
    found = {}
    for source, key in (("train", "step"), ("held_out", "prompt")):
        groups: dict[str, list[Record]] = {}
        for record in records:
            if record.get("source") == source:
                groups.setdefault(str(record.get(key)), []).append(record)
        found[source] = [*groups.values()][-MOST_SAMPLES:]
    return found


def render(runs: Sequence[Run], figures: Figures, warn: Warn) -> str:
    page = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    return Template(page, autoescape=True, trim_blocks=True).render(
        runs=runs,
        ends=ENDS,
        results=[run.ends() for run in runs],
        diagnose=diagnose,
        samples=[samples_of(run, warn) for run in runs],
        figures=figures,
        changed=differing([Config().flat(), *(run.config.flat() | run.versions for run in runs)]),
    )


class Arguments(RunArguments):
    out: Path = Path("report.html")
    """The page."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, console, runs = runs_of(Arguments, argv, prog, __doc__)
    html = render(runs, figures_of(runs), console.warn)
    arguments.out.write_text(html, "utf-8", "replace")
    console.say(f"wrote {arguments.out}")

"""Write a page about runs: results, findings, curves, settings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that loads nothing else, with figures of matplotlib. Several runs share each
figure.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path

import numpy as np
import tyro
from jinja2 import Template

from ..config import Config
from ..errors import refusing
from ..run.console import Console
from ..run.logging import (
    EVAL,
    METRICS,
    OVERVIEW_COLUMNS,
    SAMPLES,
    Run,
    differing,
    read_jsonl,
    read_run,
)
from ..settings import OnePath
from .doctor import RunArguments, diagnose

BESIDE = ("step", "n")  # numbers of the logs that are not curves
MAX_POINTS = 100  # of a curve, where more points are averaged with their neighbours
MAX_SAMPLES = 10  # the last groups of training, and the last held-out prompts


def plot_curve(
    labelled: Mapping[str, Sequence[Run]],
    name: str,
    out: str | StringIO,
    xlabel: str = "training step",
    title: str = "",
    has_legend: bool = True,
) -> None:
    """Draw a curve into a file, or as SVG into a buffer: mean and range of the runs of each label.

    With a title, the values are fractions, in percent. A label that begins with "control" is grey.
    """
    with refusing("curves need matplotlib: pip install 'minigrpo[report]'"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for label, runs in labelled.items():
        curves = [run.curve(name) for run in runs]
        shared_steps = sorted(set.intersection(*map(set, curves)))
        pieces = [piece for piece in np.array_split(shared_steps, MAX_POINTS) if len(piece)]
        values = [[curve[step] for step in piece for curve in curves] for piece in pieces]
        steps = [piece.mean() for piece in pieces]
        means = [np.mean(x) for x in values]
        color = "0.55" if label.startswith("control") else None
        (line,) = axes.plot(steps, means, ".-", label=label, color=color)
        lowest = [min(x) for x in values]
        highest = [max(x) for x in values]
        axes.fill_between(steps, lowest, highest, alpha=0.2, color=line.get_color())
    axes.set(title=title or name, xlabel=xlabel)
    if title:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    if len(labelled) > 1 and has_legend:
        figure.legend(loc="outside lower center", fontsize="small")  # it hides no curve
    with matplotlib.rc_context({"savefig.format": "svg", "svg.fonttype": "none"}):
        figure.savefig(out, dpi=200)


def figures_of(runs: Sequence[Run]) -> list[str]:
    """A figure of each curve as SVG, of evaluations first, without curves that are always 0."""
    curves = dict[str, None]()  # their names, as `Run.curve` takes them
    for run in runs:
        for prefix, log in ((EVAL, run.evaluations), ("", run.metrics)):
            for line in log:
                names = [name for name, value in line.items() if value and name not in BESIDE]
                curves |= {prefix + name: None for name in names}
    figures = []
    for curve in curves:
        svg = StringIO()
        plot_curve({run.name: [run] for run in runs}, curve, svg, has_legend=False)
        figures.append(svg.getvalue())
    return figures


class ReportArguments(RunArguments):
    out: OnePath = Path("report.html")
    """The page."""


def report_command(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(ReportArguments, args=argv, prog=prog, description=__doc__)
    runs = [read_run(folder) for folder in arguments.runs]
    settings = [run.config.flat() | run.versions for run in runs]
    titles = []
    for run in runs:
        of_run = run.config
        written = datetime.fromtimestamp((run.folder / METRICS).stat().st_mtime)
        names = [of_run.model.name, of_run.task.name, of_run.loss.name]
        titles.append([run.name, *names, f"{written:%Y-%m-%d %H:%M}"])
    template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    page = Template(template, autoescape=True, trim_blocks=True).render(
        runs=runs,
        titles=titles,
        columns=OVERVIEW_COLUMNS,
        overviews=[run.overview() for run in runs],
        diagnose=diagnose,
        samples=[read_jsonl(run.folder / SAMPLES) for run in runs],
        max_samples=MAX_SAMPLES,
        figures=figures_of(runs),
        changed=differing([Config().flat(), *settings]),
    )
    arguments.out.write_text(page, "utf-8", "replace")
    Console().say(f"wrote {arguments.out}")

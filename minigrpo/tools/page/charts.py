"""The curves of the page, as Bokeh figures that page.js colours and smooths.

Every line has two columns: what was logged, and what is drawn, which page.js smooths. One hidden
line per figure carries the hover, because a hover per line would cover the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.calibration import calibration, reliability
from ...runtime.flags import ConfigError
from ...runtime.measures import wilson
from ..run_data import RunData
from .lines import Line, line_of
from .panels import GROUPS, Panel, label

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

# each has a contrast of at least 3 with the cards of both themes
COLORS = "#2f7fd6", "#d9741a", "#2e9e6b", "#b85cc4", "#a9821f", "#3a93a8", "#d1495b", "#7d828b"
HEIGHT = 210


@dataclass(frozen=True)
class Answers:
    """Answers that state how sure they are."""

    confidence: np.ndarray  # [n], from 0 to 1
    correct: np.ndarray  # [n], 1 or 0
    where: str  # they were given, in words


@dataclass(frozen=True)
class Card:
    """A figure with its heading and legend."""

    title: str
    about: str
    legend: Sequence[tuple[str, str]]  # (color, label)
    figure: "Figure"
    always_legend: bool = False  # also where there is only one line to name


def require_bokeh() -> None:
    """Raise ConfigError, in one line, if the charting library is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise ConfigError("minigrpo report needs Bokeh: pip install 'minigrpo[report]'") from None


def charts(
    runs: Sequence[RunData], answers: Sequence[Answers | None] = ()
) -> dict[str, list[Card]]:
    """The figures of each group of panels, without those that have nothing to show.

    `answers` are those of each run that state a confidence; their figure ends the first group.
    """
    from bokeh.models import DataRange1d

    steps = DataRange1d(range_padding=0.02)  # shared: a zoom into one figure is one into all
    found = {
        group: [card for panel in panels for card in _cards(panel, runs, steps)]
        for group, panels in GROUPS.items()
    }
    if stated := [(run.name, x) for run, x in zip(runs, answers, strict=False) if x]:
        found[next(iter(found))].append(_reliability(stated))
    return {group: cards for group, cards in found.items() if cards}


def _cards(panel: Panel, runs: Sequence[RunData], steps: Any) -> Iterator[Card]:
    """A panel's figure; with several runs, one for each of its metrics."""
    if len(runs) == 1:
        names = panel.names(runs[0])
        lines = [line_of(panel, runs[0], name, label(panel, name, runs[0])) for name in names]
        yield from _card(panel, panel.title, lines, steps, several=False)
        return
    every = dict.fromkeys(name for run in runs for name in panel.names(run))
    if panel.stacked:  # phases of several runs would cover each other
        panel, every = replace(panel, about="All phases together."), {"step_time": None}
    for name in every:
        owner = next((run for run in runs if name in panel.names(run)), runs[0])
        title = f"{panel.title}: {label(panel, name, owner)}" if len(every) > 1 else panel.title
        lines = [line_of(panel, run, name, run.name) for run in runs]
        yield from _card(panel, title, lines, steps, several=True)


def _card(
    panel: Panel, title: str, lines: Sequence[Line], steps: Any, *, several: bool
) -> Iterator[Card]:
    """The card of these lines, unless they have no values or, of a rare trouble, only zeros.

    `several`: they are of one metric of several runs, not of several metrics of one.
    """
    known = [line for line in lines if np.isfinite(line.values).any()]
    if not known or (panel.rare and not any(np.nansum(np.abs(x.values)) for x in known)):
        return
    colors = {id(line): COLORS[i % len(COLORS)] for i, line in enumerate(lines)}
    pairs = [(colors[id(line)], line) for line in known]
    legend = [(color, line.label) for color, line in pairs]
    stacked = panel.stacked and not several and len(pairs) > 1
    yield Card(title, panel.about, legend, _figure(pairs, steps, panel.evaluations, stacked))


def _figure(
    lines: Sequence[tuple[str, Line]], steps: Any, evaluations: bool, stacked: bool
) -> "Figure":
    from bokeh.models import Range1d

    plot = _empty(x_range=steps)
    if not any(np.nansum(np.abs(line.values)) for _, line in lines):
        plot.y_range = Range1d(-0.04, 1.04)  # all values are 0; Bokeh would take -1 to 1
    if stacked:
        columns = [f"drawn{i}" for i in range(len(lines))]
        source = _source(lines[0][1].steps, [line.values for _, line in lines])
        plot.varea_stack(columns, x="step", source=source, color=[x for x, _ in lines], alpha=0.75)
        plot.y_range.start = 0
    else:
        for color, line in lines:
            _draw(plot, color, line, evaluations)
    _add_hover(plot, lines)
    return plot


def _empty(**options: Any) -> "Figure":
    """A figure without a line. Its colours are those of the page, which page.js sets."""
    from bokeh.models import CustomJSTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="box_zoom,reset",
        active_drag=None,  # or a finger could not scroll the page
        toolbar_location="above",
        toolbar_inner=True,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=48,
        min_border_right=12,
        min_border_top=8,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.formatter = CustomJSTickFormatter(code="return String(Number(tick.toPrecision(4)))")
        axis.axis_line_color = axis.minor_tick_line_color = axis.major_tick_line_color = None
        axis.major_label_text_font_size = "12px"
        axis.ticker.desired_num_ticks = 5
    plot.xgrid.grid_line_color = None
    return plot


def _reliability(stated: Sequence[tuple[str, Answers]]) -> Card:
    """How often answers are right, by how sure they say they are."""
    plot = _empty(x_range=(-0.02, 1.02), y_range=(-0.02, 1.02))
    plot.line([0, 1], [0, 1], line_color=COLORS[-1], line_dash="dashed")
    legend = []
    for i, (name, answers) in enumerate(stated):
        bins = reliability(answers.confidence, answers.correct)
        used = np.flatnonzero(bins.count)
        shares = [wilson(float(bins.accuracy[k]), float(bins.count[k])) for k in used]
        low, high = (np.array([getattr(x, end) for x in shares]) for end in ("low", "high"))
        line = Line(name, bins.confidence[used], bins.accuracy[used], low, high)
        color = COLORS[i % len(COLORS)]
        _draw(plot, color, line, evaluations=True)
        count = len(answers.confidence)
        ece = calibration(answers.confidence, answers.correct)["ece"]
        legend.append((color, f"{name}, {answers.where}: {count} answers, ECE {ece:.3f}"))
    about = "Share of right answers by stated confidence; on the diagonal they agree."
    return Card("Reliability", about, legend, plot, always_legend=True)


def _source(steps: np.ndarray, values: Sequence[np.ndarray], *, smooth: bool = True) -> Any:
    """Columns `step`, and for each line `logged0` and `drawn0`, which page.js makes smooth."""
    from bokeh.models import ColumnDataSource

    columns = {"step": _short(steps)}
    for i, column in enumerate(values):
        columns[f"drawn{i}"] = _short(column)
        if smooth:
            columns[f"logged{i}"] = _short(column)
    return ColumnDataSource(columns, tags=["smooth"] if smooth else [])


def _short(values: np.ndarray) -> np.ndarray:
    """Half of the bytes in the page; a value that float32 has no room for is infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _draw(plot: "Figure", color: str, line: Line, evaluations: bool) -> None:
    if not evaluations:
        source = _source(line.steps, [line.values])
        plot.line("step", "logged0", source=source, line_color=color, line_width=1, line_alpha=0.25)
        plot.line("step", "drawn0", source=source, line_color=color, line_width=2)
        if np.isfinite(line.values).sum() == 1:  # which is no line yet
            plot.scatter("step", "drawn0", source=source, color=color, size=6)
        return
    source = _source(line.steps, [line.values], smooth=False)
    if line.low is not None and line.high is not None:
        source.add(_short(line.low), "low")
        source.add(_short(line.high), "high")
        ends = {"x0": "step", "x1": "step", "y0": "low", "y1": "high"}
        plot.segment(**ends, source=source, line_color=color, line_width=2, line_alpha=0.35)
    plot.line("step", "drawn0", source=source, line_color=color, line_width=2)
    plot.scatter("step", "drawn0", source=source, color=color, size=6)


def _add_hover(plot: "Figure", lines: Sequence[tuple[str, Line]]) -> None:
    """What was logged, of all lines at the step under the pointer."""
    from bokeh.models import ColumnDataSource, HoverTool

    every = np.unique(np.concatenate([line.steps for _, line in lines]))
    columns = {"step": _short(every)}
    for i, (_, line) in enumerate(lines):
        column = np.full(len(every), np.nan)
        column[np.searchsorted(every, line.steps)] = line.values
        columns[f"value{i}"] = _short(column)
    table = np.stack([columns[f"value{i}"] for i in range(len(lines))])
    table = np.where(np.isfinite(table), table, np.nan)
    count = np.maximum(np.isfinite(table).sum(0), 1)
    columns["middle"] = np.nansum(table, 0) / count  # within the range of the lines
    source = ColumnDataSource(columns)
    # invisible, but not of alpha 0, which would hide it from the pointer too
    hidden = plot.line("step", "middle", source=source, line_color="#888888", line_alpha=0.001)
    names = [f"value{i}" for i in range(len(lines))]
    plot.add_tools(
        HoverTool(
            renderers=[hidden],
            mode="vline",
            line_policy="nearest",
            point_policy="follow_mouse",
            tooltips=[
                ("step", "@step"),
                *(
                    (line.label, f"@{name}{{%.4g}}")
                    for name, (_, line) in zip(names, lines, strict=True)
                ),
            ],
            formatters={f"@{name}": "printf" for name in names},
        )
    )

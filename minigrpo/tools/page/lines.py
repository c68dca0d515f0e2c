"""The points of the page's curves."""

from dataclasses import dataclass
from math import isfinite

import numpy as np

from ...runtime.measures import SAMPLED, number_of, wilson
from ..records import Record, is_number
from ..run_data import RunData
from .panels import Panel

MOST_POINTS = 2000  # per line; longer runs are averaged


@dataclass(frozen=True)
class Line:
    """One curve: what it is called, and its points."""

    label: str
    steps: np.ndarray  # [n]
    values: np.ndarray  # [n], NaN where nothing was logged
    low: np.ndarray | None = None  # [n], of its 95 % interval
    high: np.ndarray | None = None


def line_of(panel: Panel, run: RunData, name: str, called: str) -> Line:
    """A metric or a measure of a run under the name that the legend has for it."""
    if panel.evaluations:
        return _evaluated(run, name, called)
    steps = np.array([record["step"] for record in run.metrics])
    return Line(called, *_thinned(steps, run.series(name)))


def _evaluated(run: RunData, name: str, called: str) -> Line:
    """A measure of the evaluations, with its interval if it is the share of right answers."""
    found: list[tuple[int, float, Record]] = [
        (record["step"], float(record[name]), record)
        for record in run.evaluations
        if is_number(record.get(name)) and isfinite(record[name])
    ]
    steps = np.array([step for step, _, _ in found])
    values = np.array([value for _, value, _ in found])
    low, high = values.copy(), values.copy()
    if name.removesuffix(SAMPLED) == run.success:
        for i, (_, value, record) in enumerate(found):
            if (n := number_of(record)) and 0 <= value <= 1:
                low[i], high[i] = (x := wilson(value, n)).low, x.high
    return Line(called, steps, values, low, high)


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points, each the mean of as many neighbours."""
    size = -(-len(steps) // MOST_POINTS)
    if size == 1:
        return steps, values
    parts = np.split(values, range(size, len(values), size))
    means = [
        part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts
    ]
    return steps[::size][: len(means)], np.array(means)

"""How far the training curves of two precisions are apart: smoothing, difference, verdict, figure.

A curve is an array `[seeds, points]`. Both precisions train on the same seeds, so they start from
the same weights and see the same prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .report import COLORS, Column, number, pyplot

LIMIT = 0.05  # a precision passes if its curves differ by less than this from float32's
# The denominator of a relative difference is at least this share of the curve's largest value:
# exact-match starts near 0, where any difference would be large in relative terms.
FLOOR = 0.05
MAX_POINTS = 50  # per curve in the JSON file; the runs' folders have all of them


@dataclass(frozen=True)
class Difference:
    """How far the mean curve of a precision is from the mean curve of float32, both smoothed.

    All values but `step` are relative to float32's mean curve.
    """

    largest: float  # of the absolute differences
    step: int  # of the largest
    spread: float | None  # standard deviation over float32's seeds at that step; None: one seed
    mean: float  # of the signed differences: above 0, the precision's curve is higher
    mean_spread: float | None  # of the standard deviations over all steps

    @property
    def passed(self) -> bool:
        return self.largest < LIMIT  # False for NaN

    @property
    def verdict(self) -> str:
        if not math.isfinite(self.largest):
            return "fails: the curve is not finite"
        limit = f"{100 * LIMIT:.0f} %"
        if self.spread is None:
            beside = "the spread of seeds is unknown: one seed"
        elif self.largest <= self.spread:
            beside = "below the spread of seeds"
        else:
            beside = "above the spread of seeds"
        if self.passed:
            return f"below {limit}, {beside}"
        if self.spread is not None and self.largest <= self.spread:
            return f"undecided: above {limit}, but {beside}; use more seeds"
        return f"fails: above {limit}, {beside}"


def smooth(curves: np.ndarray, window: int) -> np.ndarray:
    """The moving average of `[..., n]` over `window` points, `[..., n - window + 1]`.

    Only whole windows count: at the ends, shorter ones would be noisier than the rest.
    """
    window = min(window, curves.shape[-1])
    return np.lib.stride_tricks.sliding_window_view(curves, window, axis=-1).mean(-1)


def smooth_steps(steps: np.ndarray, window: int) -> np.ndarray:
    """The step in the middle of each window, `[n - window + 1]`."""
    return np.rint(smooth(steps.astype(float), window)).astype(int)


def compare(
    float32: np.ndarray, other: np.ndarray, steps: np.ndarray, window: int
) -> tuple[Difference, np.ndarray, np.ndarray | None]:
    """Compare the curves of two precisions, `[seeds, n]`, at `steps`, `[n]`.

    Returns:
        The difference, and its curves: the signed relative difference of the means, and the
        relative standard deviation over float32's seeds (None for one seed), both
        `[n - window + 1]`.
    """
    smoothed = smooth(float32, window)
    base = smoothed.mean(0)
    scale = np.maximum(np.abs(base), FLOOR * np.abs(base).max())
    scale = np.where(scale > 0, scale, 1.0)  # a curve of zeros
    apart = (smooth(other, window).mean(0) - base) / scale
    spread = smoothed.std(0, ddof=1) / scale if len(float32) > 1 else None
    worst = int(np.abs(apart).argmax())  # the first NaN, if there is one
    difference = Difference(
        largest=float(abs(apart[worst])),
        step=int(smooth_steps(steps, window)[worst]),
        spread=None if spread is None else float(spread[worst]),
        mean=float(apart.mean()),
        mean_spread=None if spread is None else float(spread.mean()),
    )
    return difference, apart, spread


@dataclass(frozen=True)
class Curves:
    """One measure of a job, in all precisions."""

    job: str
    measure: str
    label: str  # of the axis
    steps: np.ndarray  # [n]
    window: int  # points that are averaged
    unit: str  # of the points: steps or evaluations
    by_precision: Mapping[str, np.ndarray]  # each [seeds, n], float32 first

    def records(self) -> list[dict[str, Any]]:
        """One record per precision other than float32, as plain JSON."""
        float32 = self.by_precision["float32"]
        found = []
        for precision, values in self.by_precision.items():
            if precision == "float32":
                continue
            difference = compare(float32, values, self.steps, self.window)[0]
            ends = [float(smooth(x, self.window).mean(0)[-1]) for x in (float32, values)]
            found.append(
                {
                    "name": f"{self.job}: {self.measure}",
                    "precision": precision,
                    "seeds": len(values),
                    "window": f"{self.window} {self.unit}",
                    "float32_end": ends[0],
                    "end": ends[1],
                    **asdict(difference),
                    "passed": difference.passed,
                    "verdict": difference.verdict,
                }
            )
        return without_nan(found)

    def to_dict(self) -> dict[str, Any]:
        """The smoothed curves, at no more than MAX_POINTS steps."""
        steps = smooth_steps(self.steps, self.window)
        every = max(1, math.ceil(len(steps) / MAX_POINTS))
        thinned = {
            name: [
                [float(f"{x:.5g}") for x in row] for row in smooth(rows, self.window)[:, ::every]
            ]
            for name, rows in self.by_precision.items()
        }
        record = {
            "job": self.job,
            "measure": self.measure,
            "window": f"{self.window} {self.unit}",
            "steps": steps[::every].tolist(),
            "smoothed": thinned,
        }
        return without_nan(record)


def without_nan(record: Any) -> Any:
    """A record as valid JSON, with null for what is not a number."""
    if isinstance(record, dict):
        return {key: without_nan(value) for key, value in record.items()}
    if isinstance(record, list):
        return [without_nan(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def signed_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


COLUMNS: tuple[Column, ...] = (
    ("", "name", str),
    ("precision", "precision", str),
    ("mean of", "window", str),
    ("float32 at end", "float32_end", number("{:.4g}")),
    ("at end", "end", number("{:.4g}")),
    ("largest diff.", "largest", percent),
    ("at step", "step", str),
    ("spread there", "spread", percent),
    ("mean diff.", "mean", signed_percent),
    ("mean spread", "mean_spread", percent),
)


def draw(all_curves: Sequence[Curves], out: Path, title: str, console: Console) -> None:
    """Per measure: the smoothed means with the seeds' range shaded, and below the differences."""
    if (plt := pyplot(console)) is None:
        return
    columns = len(all_curves)
    options: dict[str, Any] = {"squeeze": False, "sharex": "col", "layout": "constrained"}
    figure, panels = plt.subplots(
        2, columns, figsize=(3.7 * columns + 1, 5), height_ratios=[2, 1], **options
    )
    for (top, bottom), curves in zip(panels.T, all_curves, strict=True):
        steps = smooth_steps(curves.steps, curves.window)
        for color, (precision, values) in zip(COLORS, curves.by_precision.items(), strict=False):
            smoothed = smooth(values, curves.window)
            top.plot(steps, smoothed.mean(0), color=color, linewidth=1.4, label=precision)
            low, high = smoothed.min(0), smoothed.max(0)
            top.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            if precision == "float32":
                continue
            float32 = curves.by_precision["float32"]
            _, apart, spread = compare(float32, values, curves.steps, curves.window)
            bottom.plot(steps, 100 * apart, color=color, linewidth=1.2)
            if spread is not None:
                bottom.fill_between(steps, -100 * spread, 100 * spread, color="0.9", linewidth=0)
        for side in (-100 * LIMIT, 100 * LIMIT):
            bottom.axhline(side, color="0.5", linestyle=":", linewidth=1)
        averaged = f"{curves.window} {curves.unit}"
        top.set_title(f"{curves.job}: {curves.label}\n(mean of {averaged})", fontsize=9)
        bottom.set_xlabel("step")
    panels[0, 0].legend(frameon=False, fontsize=8)
    panels[1, 0].set_ylabel("difference from float32, %\n(grey: spread of seeds)", fontsize=8)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.savefig(out, dpi=130)
    plt.close(figure)

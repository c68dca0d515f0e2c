"""Two models on the same held-out examples: their difference, with a paired test.

Right or wrong: McNemar's exact test, which asks whether the examples that only one of the two gets
right are as many on both sides (McNemar 1947), and the interval of Agresti and Min (2005). Other
measures: the bootstrap, which draws examples with replacement. Several seeds: Student's t, over
the differences of the seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.measures import Z, student_t
from ..runtime.rng import stream

ALPHA = 0.05
RESAMPLES = 2000
BLOCK = 2**22  # draws per block, which bounds the memory


@dataclass(frozen=True)
class Difference:
    """Second minus first, over the examples that the measure concerns in both."""

    n: int
    first: float  # mean
    second: float
    low: float  # 95 % interval of the difference; NaN if there is none
    high: float
    p: float  # NaN where the interval alone decides
    lost: int = 0  # right in the first only; for a measure of right and wrong
    won: int = 0

    @property
    def change(self) -> float:
        return self.second - self.first

    @property
    def is_shown(self) -> bool:
        """Whether these examples show a difference, at the 5 % level."""
        if not math.isnan(self.p):
            return self.p < ALPHA
        return self.low > 0 or self.high < 0


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare `[n]` values of the same n examples; NaN where a measure does not concern one.

    Several seeds of both, `[seeds, n]`, are averaged: an example that is hard for one model is hard
    for the other, so the same n examples are no more than n. McNemar's test is then the sign test.

    Raises ValueError if no example has both values.
    """
    both = np.stack([np.atleast_2d(first), np.atleast_2d(second)])  # [2, seeds, n]
    known = both[..., ~np.isnan(both).any(axis=(0, 1))]
    if not known.size:
        raise ValueError("no example has both values")
    x, y = known.mean(axis=1)
    means = len(x), float(x.mean()), float(y.mean())
    if not np.isin(known, (0, 1)).all():
        return Difference(*means, *bootstrap(y - x), math.nan)
    lost, won = int((x > y).sum()), int((x < y).sum())
    low, high = agresti_min(lost, won, len(x))
    if known.shape[1] > 1 and len(x) > 1:  # what is won in some seeds only counts less
        ends = bootstrap(y - x)
        low, high = min(low, ends[0]), max(high, ends[1])
    return Difference(*means, low, high, mcnemar(lost, won), lost, won)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's exact test: a fair coin decides each discordant pair."""
    n, few = lost + won, min(lost, won)
    ways = tail = 1  # exact whole numbers: in how many ways k of n coins show heads, for k = 0
    for k in range(few):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)


def agresti_min(lost: int, won: int, n: int) -> tuple[float, float]:
    """The 95 % interval of the difference of paired shares: Wald's, with 1/2 added to each cell."""
    n, lost_, won_ = n + 2, lost + 0.5, won + 0.5
    center = (won_ - lost_) / n
    half = Z * math.sqrt((won_ + lost_) / n - center**2) / math.sqrt(n)
    return max(-1.0, center - half), min(1.0, center + half)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of `[n]` values; NaN for one value."""
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    rng, rows = stream(0, "compare"), max(1, BLOCK // n)
    counts = [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
    means = [values[rng.integers(n, size=(count, n))].mean(axis=1) for count in counts]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def over_seeds(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean difference of seeds, of which there are at least three."""
    values = np.array(differences)
    half = student_t(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half

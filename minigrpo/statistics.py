"""Means, intervals, tests and calibration of evaluations.

Intervals are 95 %, over examples, because the K completions of one example are not independent.
Means of values from 0 to 1 have Wilson's interval, all others that of Student's t.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
# The same number for Student's t, as a polynomial in 1 / degrees of freedom, is right within 1 %
# from 2 degrees on (Abramowitz and Stegun, 26.7.5).
STUDENT_T = (1.590, 2.556, 2.822, 2.372, Z)


@dataclass(frozen=True)
class PartlyKnown:
    """Numbers of which some are not known: `[n]`, or `[n, K]` for K completions per example."""

    values: np.ndarray  # float64
    known: np.ndarray  # bool

    @property
    def known_values(self) -> np.ndarray:
        return self.values[self.known]


class Estimate(NamedTuple):
    """A measure with its 95 % confidence interval, which is infinite where there is none."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        interval = "" if math.isinf(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


def means(numbers: PartlyKnown) -> PartlyKnown:
    """Each example's mean of its known values: `[n, K]` -> `[n]`."""
    sums = np.where(numbers.known, numbers.values, 0.0).sum(1)
    counts = numbers.known.sum(1)
    return PartlyKnown(sums / np.maximum(counts, 1), counts > 0)


def estimate(values: np.ndarray) -> Estimate:
    """The mean of `[n]` values, one of each example; NaN if n is 0."""
    if not len(values):
        return Estimate(math.nan)
    if ((values >= 0) & (values <= 1)).all():
        return wilson(float(values.mean()), len(values))
    return students_t(values)


def wilson(fraction: float, n: float) -> Estimate:
    """A fraction of n trials with Wilson's score interval (1927), which lies within [0, 1]."""
    scale = 1 + Z**2 / n
    center = (fraction + Z**2 / (2 * n)) / scale
    variance = fraction * (1 - fraction) / n + Z**2 / (4 * n**2)
    half_width = Z * math.sqrt(variance) / scale
    low = max(0.0, center - half_width)
    high = min(1.0, center + half_width)
    return Estimate(fraction, low, high)


def students_t(values: np.ndarray) -> Estimate:
    """The mean of `[n]` values, without an interval if n is 1."""
    mean = float(values.mean())
    n = len(values)
    if n < 2:
        return Estimate(mean)
    deviations = np.polyval(STUDENT_T, 1 / (n - 1))
    half_width = float(deviations * values.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half_width, mean + half_width)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is right, if `num_correct` of `num_samples` are.

    It is 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021, arXiv 2107.03374).
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def passes(right: PartlyKnown) -> dict[str, Estimate]:
    """pass@k for the powers of two below K, and K. `right` [n, K] is 1 for a right sample, else 0.

    An example counts if all of its samples are known.
    """
    num_samples = right.values.shape[1]
    counts = right.values[right.known.all(1)].sum(1).astype(int).tolist()
    if num_samples < 2 or not counts:
        return {}
    estimates = {}
    for k in sorted({num_samples, *(2**i for i in range(num_samples.bit_length()))}):
        chances = [pass_at_k(num_samples, count, k) for count in counts]
        estimates[f"pass@{k}"] = estimate(np.array(chances))
    return estimates


class Difference(NamedTuple):
    """How two models differ on n examples."""

    n: int
    first: float  # mean of the first model
    second: float
    change: Estimate  # second minus first
    p: float | None  # p-value of McNemar's test, or None where the interval decides
    is_shown: bool  # whether there is a difference, at the 5 % level


def difference(first: np.ndarray, second: np.ndarray, by_seed: np.ndarray) -> Difference:
    """Compare `[n]` values of the same n examples.

    The interval of the mean change decides, or McNemar's exact test if all values are 0 or 1. Three
    or more changes `by_seed`, `[seeds]`, decide instead, but never narrow the interval: seeds may
    agree by chance.
    """
    change = students_t(second - first)
    p = None
    if len(by_seed) > 2:
        of_seeds = students_t(by_seed)
        low = min(change.low, of_seeds.low)
        high = max(change.high, of_seeds.high)
        change = Estimate(change.value, low, high)
    elif np.isin([first, second], (0, 1)).all():
        lost = int((first > second).sum())
        won = int((first < second).sum())
        p = mcnemar(lost, won)
    excludes_zero = change.low > 0 or change.high < 0
    is_shown = excludes_zero if p is None else p < 0.05
    return Difference(len(first), float(first.mean()), float(second.mean()), change, p, is_shown)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's exact test: a fair coin decides each discordant pair."""
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**n)


def calibration(confidence: ArrayLike, correct: ArrayLike) -> dict[str, float]:
    """Measure how well `[n]` confidences in [0, 1] fit `[n]` outcomes, as RLCR does (2507.16806).

    brier is the mean of (confidence - correct)^2; 0 is best.
    ece is the expected calibration error with ten bins (Naeini et al. 2015), the sum over bins of
        (fraction of the answers) x |mean confidence - fraction of right answers|. Bin k holds
        k/10 <= confidence < (k+1)/10, and the last one also 1.
    auroc is the probability that a right answer has a higher confidence than a wrong one, where
        equal ones count one half. It is left out if all answers are right, or all wrong.
    """
    q = np.asarray(confidence, dtype=float)
    c = np.asarray(correct, dtype=float)
    is_valid = np.isin(c, (0, 1)) & (q >= 0) & (q <= 1)
    if q.shape != c.shape or not q.size or not is_valid.all():
        raise ValueError("confidence must be in [0, 1], correct 0 or 1, and both [n], n > 0")
    # Rounding keeps 0.7 in its bin: in float32 it is 0.69999999.
    tenths = np.round(q * 10, 6)
    gaps, _ = np.histogram(tenths, bins=10, range=(0, 10), weights=q - c)
    measures = {
        "brier": float(np.mean((q - c) ** 2)),
        "ece": float(np.abs(gaps).sum() / len(q)),
    }
    if c.min() < c.max():
        right = q[c == 1]
        wrong = np.sort(q[c == 0])
        wins = np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")
        measures["auroc"] = float((wins / 2).mean() / len(wrong))
    return measures

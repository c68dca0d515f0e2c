"""Means, intervals, tests and calibration of evaluations.

Intervals are 95 %, and over examples, because the K completions of one are not independent. Shares
have Wilson's interval, all other measures that of Student's t.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
# the same of Student's t, as a polynomial in 1 / degrees of freedom: within 1 % from 2 degrees on
# (Abramowitz and Stegun, 26.7.5)
STUDENT_T = (1.590, 2.556, 2.822, 2.372, Z)


class Estimate(NamedTuple):
    """A measure with its 95 % confidence interval; the bounds are NaN without one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


def means(values: np.ndarray) -> np.ndarray:
    """`[n]` means of `[n, K]` values, K of each of n examples; NaN is left out."""
    return torch.from_numpy(values).double().nanmean(1).numpy()


def estimate(values: np.ndarray) -> Estimate:
    """The mean of `[n]` values, one of each example; NaN is left out."""
    each = values[~np.isnan(values)]
    if not len(each):
        return Estimate(math.nan)
    is_share = np.isin(each, (0, 1)).all()
    return wilson(float(each.mean()), len(each)) if is_share else students_t(each)


def wilson(share: float, n: float) -> Estimate:
    """A share of n trials, with Wilson's score interval (1927): within [0, 1], and never empty."""
    scale = 1 + Z**2 / n
    center = (share + Z**2 / (2 * n)) / scale
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / scale
    return Estimate(share, max(0.0, center - half), min(1.0, center + half))


def students_t(values: np.ndarray) -> Estimate:
    """The mean of `[n]` values, with an interval unless n is 1."""
    mean = float(values.mean())
    n = len(values)
    if n < 2:
        return Estimate(mean)
    half = float(np.polyval(STUDENT_T, 1 / (n - 1)) * values.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is right, of which `num_correct` of `num_samples` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021, arXiv 2107.03374).
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def passes(right: np.ndarray) -> dict[str, Estimate]:
    """pass@k of `[n, K]` samples (1 right, 0 wrong, NaN), for the powers of two below K, and K."""
    num_samples = right.shape[1]
    if num_samples < 2:
        return {}
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    counts = right.sum(1)
    known = counts[~np.isnan(counts)]
    return {
        f"pass@{k}": estimate(np.array([pass_at_k(num_samples, int(c), k) for c in known]))
        for k in (*ks, num_samples)
    }


class Difference(NamedTuple):
    """How two models differ on n examples."""

    n: int
    first: float  # mean
    second: float
    change: Estimate  # second minus first
    p: float  # NaN where the interval alone decides
    is_shown: bool  # whether there is a difference, at the 5 % level


def difference(first: np.ndarray, second: np.ndarray, by_seed: np.ndarray) -> Difference:
    """Compare `[n]` values of the same n examples.

    The interval is that of the mean; what is right or wrong also has McNemar's exact test. But the
    changes `by_seed` [seeds] decide if there are three or more. The interval stays at least as wide
    as that over the examples: seeds may agree by chance.
    """
    change = students_t(second - first)
    p = math.nan
    if len(by_seed) > 2:
        of_seeds = students_t(by_seed)
        low = min(change.low, of_seeds.low)
        high = max(change.high, of_seeds.high)
        change = Estimate(change.value, low, high)
    elif np.isin([first, second], (0, 1)).all():
        p = mcnemar(int((first > second).sum()), int((first < second).sum()))
    is_shown = change.low > 0 or change.high < 0 if math.isnan(p) else p < 0.05
    return Difference(len(first), float(first.mean()), float(second.mean()), change, p, is_shown)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's exact test: a fair coin decides each discordant pair."""
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**n)


def calibration(confidence: ArrayLike, correct: ArrayLike) -> dict[str, float]:
    """Measure how well `[n]` confidences in [0, 1] fit `[n]` outcomes, as RLCR does (2507.16806).

    brier: mean of (confidence - correct)^2; 0 is best.
    ece: the expected calibration error with ten bins (Naeini et al. 2015): the sum over bins of
        (share of the answers) x |mean confidence - share of right answers|. Bin k holds
        k/10 <= confidence < (k+1)/10, the last one also 1. Chance makes it too large on average.
    auroc: the probability that a right answer has a higher confidence than a wrong one, where equal
        ones count one half. Left out if all answers are right, or all wrong.
    """
    q = np.asarray(confidence, dtype=float)
    c = np.asarray(correct, dtype=float)
    if q.shape != c.shape or not q.size or not (np.isin(c, (0, 1)) & (q >= 0) & (q <= 1)).all():
        raise ValueError("confidence must be in [0, 1], correct 0 or 1, and both [n], n > 0")
    # rounded, because 0.7 in float32 is 0.69999999, which would fall into the bin below
    gaps, _ = np.histogram(np.round(q * 10, 6), bins=10, range=(0, 10), weights=q - c)
    measures = {"brier": float(np.mean((q - c) ** 2)), "ece": float(np.abs(gaps).sum() / len(q))}
    if c.min() < c.max():
        wrong = np.sort(q[c == 0])
        right = q[c == 1]
        wins_twice = np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")
        measures["auroc"] = float(wins_twice.mean() / (2 * len(wrong)))
    return measures

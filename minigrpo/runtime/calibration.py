"""How well stated confidences fit what happened: Brier score, ECE, AUROC and the reliability bins.

All take the confidence of n answers and whether each was right. None of them is a mean of a reward
part alone, so a task names them as its `summaries`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_BINS = 10


@dataclass(frozen=True)
class Reliability:
    """Answers by stated confidence, in ten bins of equal width; empty bins have NaN means."""

    count: np.ndarray  # [10] int
    confidence: np.ndarray  # [10] mean confidence
    accuracy: np.ndarray  # [10] share of right answers


def calibration(
    confidence: Sequence[float] | np.ndarray, correct: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """Measure how well confidences fit, as RLCR does (arXiv 2507.16806).

    Args:
        confidence: `[n]`, each in [0, 1].
        correct: `[n]`, each 1 or 0.

    Returns:
        brier: mean of (confidence - correct)^2, the Brier score; 0 is best.
        ece: expected calibration error, see `expected_calibration_error`; 0 is best.
        auroc: see `auroc`. Left out where it is undefined: all answers are right, or all wrong.

    Raises:
        ValueError: no values, shapes that differ, a confidence outside of [0, 1], or a `correct`
            that is neither 0 nor 1.
    """
    q, c = _checked(confidence, correct)
    measures = {"brier": float(np.mean((q - c) ** 2)), "ece": expected_calibration_error(q, c)}
    return measures if c.min() == c.max() else {**measures, "auroc": auroc(q, c)}


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Sum over bins of (share of the answers) x |mean confidence - share of right answers|.

    Naeini et al. 2015, with ten bins as in `reliability`. Chance differences add to it and cannot
    cancel, so it is too large on average, and bootstrap samples of it even more so: compare it with
    `error_by_chance`.
    """
    bins = reliability(confidence, correct)
    used = bins.count > 0
    gaps = np.abs(bins.confidence[used] - bins.accuracy[used])
    return float(np.sum(bins.count[used] * gaps) / np.sum(bins.count))


def reliability(confidence: np.ndarray, correct: np.ndarray) -> Reliability:
    """Sort `[n]` answers into bins: bin k holds k/10 <= confidence < (k+1)/10, the last also 1."""
    place = _bins(confidence)
    count = np.bincount(place, minlength=NUM_BINS)
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN of an empty bin
        means = [
            np.bincount(place, weights=values, minlength=NUM_BINS) / count
            for values in (confidence, correct)
        ]
    return Reliability(count, *means)


def error_by_chance(confidence: np.ndarray) -> float:
    """About the calibration error that n answers show if all of their confidences are true.

    It falls as n grows. The difference of two means in a bin is nearly normal, and its absolute
    value has the mean sqrt(2 / pi) x its standard deviation.
    """
    variances = np.bincount(_bins(confidence), weights=confidence * (1 - confidence))
    return float(np.sqrt(2 / np.pi * variances).sum() / len(confidence))


def auroc(confidence: np.ndarray, correct: np.ndarray) -> float:
    """The probability that a right answer has a higher confidence than a wrong one.

    Equal confidences count one half. Both kinds of answers must occur.
    """
    wrong, right = np.sort(confidence[correct == 0]), confidence[correct == 1]
    below = np.searchsorted(wrong, right, side="left")
    equal = np.searchsorted(wrong, right, side="right") - below
    return float(np.sum(below + equal / 2) / (len(wrong) * len(right)))


def _bins(confidence: np.ndarray) -> np.ndarray:
    """The bin of each of `[n]` confidences."""
    # rounded, because 0.7 in float32 is 0.69999999, which would fall into the bin below
    place = np.floor(np.round(np.asarray(confidence, dtype=float) * NUM_BINS, 6)).astype(int)
    return np.minimum(place, NUM_BINS - 1)


def _checked(
    confidence: Sequence[float] | np.ndarray, correct: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    q, c = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    if q.ndim != 1 or q.shape != c.shape or not q.size:
        raise ValueError(
            "confidence and correct must be two lists of the same length, at least 1, got shapes "
            f"{list(q.shape)} and {list(c.shape)}"
        )
    if not ((q >= 0) & (q <= 1)).all():
        raise ValueError(f"confidence must be in [0, 1], got {q[~((q >= 0) & (q <= 1))][0]}")
    if not np.isin(c, (0, 1)).all():
        raise ValueError(f"correct must be 0 or 1, got {c[~np.isin(c, (0, 1))][0]}")
    return q, c

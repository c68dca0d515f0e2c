"""What an evaluation measures: means with 95 % intervals, pass@k, and which measure comes first.

An evaluation is a record of eval.jsonl: `n`, the headline `<success>_sampled`, then the others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import numpy as np

from .rng import stream

SAMPLED = "_sampled"  # what the key of a measure of sampled completions ends with
PASS_AT = "pass@"  # what the keys of pass@k begin with
EXACT = "exact"  # the success of a task that names none: the text equals the true answer
Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
RESAMPLES = 500  # bootstrap samples per interval
# said where the first and the last evaluation have other numbers of examples
OTHER_EXAMPLES = "; the examples differ, so the change is not of the model alone"
FEWEST = 4  # values on which an estimate of a variance may rest

Summaries = Callable[[Mapping[str, np.ndarray]], Mapping[str, float]]


# --- the headline -----------------------------------------------------------------------------


def success_of(task: object) -> str:
    """The part of a task that says which completions are right."""
    return str(getattr(task, "success", "") or EXACT)


def headline(record: Mapping[str, object]) -> str:
    """The name of an evaluation's first measure, greedy; with SAMPLED, it is the sampled one."""
    found = (name for name in record if name.endswith(SAMPLED))
    return next(found, EXACT + SAMPLED).removesuffix(SAMPLED)


def in_words(name: str) -> str:
    """What a right completion is called: `exactly right`, or the name of the part."""
    return "exactly right" if name == EXACT else name.replace("_", " ")


def number_of(record: Mapping[str, object]) -> float:
    """How many examples an evaluation has; 0 if it does not say."""
    n = record.get("n")
    return float(n) if isinstance(n, int | float) and 1 <= n <= 1e15 else 0.0


def sizes(first: float, last: float, what: str = "", start: str = "before") -> str:
    """Two numbers of examples, as one where they are equal; ? for 0. `what` is what they count."""
    before, after = (f"{n:.0f}" if n else "?" for n in (first, last))
    return f"{after}{what}" if first == last else f"{before}{what} {start}, {after} after"


def answer_in_words(success: str) -> str:
    """What an example's answer is called: the truth only where a right completion equals it.

    Elsewhere it may be one of many right ones, or a random attempt: what --loss nll learns from.
    """
    return "truth" if success == EXACT else "answer for --loss nll"


# --- intervals --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A measure with its 95 % confidence interval; the bounds are NaN without one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        value, low, high = (f"{x:.3f}" if abs(x) < 1e6 else f"{x:.4g}" for x in astuple(self))
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


def estimate(values: np.ndarray) -> Estimate:
    """The mean of `[n, K]` values, K of each of n examples, with its 95 % interval.

    NaN is left out. The examples are independent, the K values of one are not, so the interval is
    that of the n means. It is Wilson's for means from 0 to 1, else Student's t. Wilson's takes as
    many trials as would give a share this variance (Korn and Graubard 1998), see `trials_of`. Both
    assume nothing else than independent examples, and t that their number is not small. One example
    has none.
    """
    known = ~np.isnan(values)
    counts, sums = known.sum(axis=1), np.where(known, values, 0.0).sum(axis=1, dtype=np.float64)
    each = sums[counts > 0] / counts[counts > 0]
    if not len(each):
        return Estimate(math.nan)
    if np.isin(each, (0, 1)).all():
        return wilson(float(each.mean()), len(each))
    center = float(each.mean())
    if len(each) < 2:
        return Estimate(center)
    if each.min() >= 0 and each.max() <= 1:
        return wilson(center, trials_of(each))
    half = student_t(len(each) - 1) * math.sqrt(float(each.var(ddof=1)) / len(each))
    return Estimate(center, center - half, center + half)


def trials_of(each: np.ndarray) -> float:
    """How many trials of a share have the variance of the mean of `[n]` values from 0 to 1.

    At least n - 1, because no values from 0 to 1 vary more than 0 and 1 do. Their variance rests on
    few of them, if most are nearly 1 and one is 0.3, as those of pass@k: on (sum of squares)^2 /
    (sum of fourth powers), by their deviations. With so many degrees of freedom, Student's t tells
    how far the variance is to be trusted; below FEWEST not at all.
    """
    n, center, squares = len(each), float(each.mean()), (each - each.mean()) ** 2
    if not squares.any():
        return n - 1
    freedom = float(squares.sum() ** 2 / (squares**2).sum())
    if freedom < FEWEST:
        return n - 1
    as_many = center * (1 - center) / float(each.var(ddof=1)) * n
    return max(n - 1, as_many * (Z / student_t(freedom)) ** 2)


def wilson(share: float, n: float) -> Estimate:
    """A share of n trials with Wilson's score interval (1927).

    Unlike the normal approximation, it stays within [0, 1] and is not empty at shares of 0 and 1.
    """
    scale = 1 + Z**2 / n
    center = (share + Z**2 / (2 * n)) / scale
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / scale
    return Estimate(share, max(0.0, min(share, center - half)), min(1.0, max(share, center + half)))


def student_t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t with `freedom` degrees, within 1 % from 2 degrees on.

    The expansion in powers of 1 / freedom (Abramowitz and Stegun, 26.7.5).
    """
    z = Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def summarise(
    summaries: Summaries, parts: Mapping[str, np.ndarray], seed: int
) -> dict[str, Estimate]:
    """A task's summaries of `[n, K]` values of its parts, with bootstrap intervals.

    The interval goes from the 2.5th to the 97.5th percentile over samples of n examples, drawn with
    replacement. The draws depend on the seed alone, so two evaluations resample the same examples.
    A summary that is not finite is left out.
    """
    # copies, because a task may change what it gets
    flat = {name: values.flatten() for name, values in parts.items()}
    n = len(next(iter(parts.values())))
    drawn: dict[str, list[float]] = {}
    rng = stream(seed, "bootstrap")
    for _ in range(RESAMPLES):
        rows = rng.integers(n, size=n)
        again = summaries({name: values[rows].reshape(-1) for name, values in parts.items()})
        for name, value in again.items():
            drawn.setdefault(name, []).append(float(value))
    out = {}
    for name, value in summaries(flat).items():
        finite = [x for x in drawn.get(name, ()) if math.isfinite(x)]
        low, high = np.percentile(finite, (2.5, 97.5)) if finite else (math.nan, math.nan)
        if math.isfinite(value):
            out[name] = Estimate(float(value), float(low), float(high))
    return out


# --- pass@k -----------------------------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is right, of which `num_correct` of `num_samples` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021, arXiv 2107.03374).

    Raises ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be from 1 to num_samples {num_samples}, got {k}")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be from 0 to {num_samples}, got {num_correct}")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """The k of pass@k: 1, the powers of two below `num_samples`, and that number."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def is_of(record: Mapping[str, float], size: int, num_samples: int) -> bool:
    """Whether an evaluation has `size` examples with `num_samples` sampled completions each."""
    ks = [int(name.removeprefix(PASS_AT)) for name in record if name.startswith(PASS_AT)]
    return record.get("n") == size and max(ks, default=1) == num_samples


def passes(right: np.ndarray) -> dict[str, Estimate]:
    """pass@k by its key, from `[n, K]` samples: 1 right, 0 wrong, NaN; none for K = 1."""
    num_samples = right.shape[1]
    if num_samples < 2:
        return {}
    counts = [int(row.sum()) for row in right if not np.isnan(row).any()]
    found = {}
    for k in ks_of(num_samples):
        each = [[pass_at_k(num_samples, count, k)] for count in counts]
        found[f"{PASS_AT}{k}"] = estimate(np.array(each).reshape(-1, 1))
    return found

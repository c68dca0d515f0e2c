"""What is measured of completions and evaluations: means, intervals, tests, calibration.

Intervals are 95 %. Examples are independent of each other; the K completions of one example are
not, so an interval is always over examples. Shares have Wilson's interval, all other measures the
percentile bootstrap.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import EXACT, Completions, RewardTable, RolloutBatch
from .rng import stream

SAMPLED = "_sampled"  # what the key of a measure of sampled completions ends with
PASS_AT = "pass@"  # what the keys of pass@k begin with
Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
STUDENT_T = (12.706, 4.303, 3.182, 2.776)  # the same of Student's t with 1, 2, ... degrees
RESAMPLES = 1000  # bootstrap samples per interval
BLOCK = 2**20  # draws at a time
ALPHA = 0.05
NUM_BINS = 10  # of the calibration error

# --- metrics of a rollout -------------------------------------------------------------------------


def rollout_metrics(batch: RolloutBatch, stops: Collection[int]) -> dict[str, float]:
    """Metrics of a batch as it was sampled, under TRL's names where TRL has one.

    They are means over this process's prompts, or counts: `DistContext.combine` tells them apart.
    """
    mask = batch.completions.completion_mask
    lengths = mask.sum(-1)
    # tokens that the update would run with --packing repeated; tokens/run is what it does run
    prompts = batch.completions.prompt_len.sum() * lengths.shape[1]
    values = {
        "completions/mean_length": lengths.float().mean().item(),
        "tokens/repeated": float(prompts + (lengths - 1).clamp(min=0).sum()),
    }
    if batch.rewards is None:
        return values
    rewards, log_kept_mass = batch.rewards, batch.completions.log_kept_mass
    if log_kept_mass is not None:
        values["sampling/removed_mass"] = float((1 - log_kept_mass.exp())[mask].mean())
    return {
        "reward": float(rewards.total.mean()),
        "reward_std": float(rewards.total.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(has_zero_variance(rewards).mean()),
        **{f"rewards/{name}/mean": mean_of(x) for name, x in rewards.parts.items()},
        **{f"rewards/{name}/failures": float(n) for name, n in rewards.failures.items()},
        "completions/clipped_ratio": 1 - float(has_ended(batch.completions, stops).float().mean()),
        **values,
        **batch.metrics,
    }


def counts_of(batch: RolloutBatch) -> dict[str, int]:
    """How many values a mean is made of, by its name, where processes may differ in that."""
    parts = batch.rewards.parts if batch.rewards else {}
    counts = {f"rewards/{name}/mean": int((~np.isnan(x)).sum()) for name, x in parts.items()}
    return counts | {"sampling/removed_mass": int(batch.completions.completion_mask.sum())}


def mean_of(scores: np.ndarray) -> float:
    """The mean of a reward over the completions that it concerns; NaN if there are none."""
    known = scores[~np.isnan(scores)]
    return float(known.mean()) if known.size else math.nan


def has_zero_variance(rewards: RewardTable) -> np.ndarray:
    """`[P]` bool: all completions of the prompt have equal rewards, which teach nothing."""
    return rewards.total.max(1) == rewards.total.min(1)


def has_ended(completions: Completions, stops: Collection[int]) -> Tensor:
    """`[P, G]` bool: the completion ends with a stop token; otherwise it was cut off."""
    last = (completions.completion_mask.sum(-1, keepdim=True) - 1).clamp(min=0)
    ends = torch.tensor(sorted(stops), dtype=torch.int64)
    return torch.isin(completions.completion_ids.gather(-1, last)[..., 0], ends)


# --- the gap between sampler and trainer ----------------------------------------------------------
# Both run the same code with the same weights, but on batches of other shapes, so they round
# differently: in float32 in the last bits, in bfloat16 by whole steps of its 8 bits.

MEAN = "sampling/logp_difference_mean"
LARGEST = "sampling/logp_difference_max"
OFF = "sampling/off_by_10_percent"
OFF_BY = 0.1  # of a probability: what OFF counts


def gap_sums(logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The gap of a batch's tokens, `[..., S]` all three, as scalars without gradient.

    Returns:
        MEAN: the sum of |logp - sampler_logp|, in nats. OFF: the number of tokens for which
        |p / p_sampler - 1| > OFF_BY. Both are to be divided by the number of tokens. LARGEST: the
        largest |logp - sampler_logp|.
    """
    gap = (logp.detach() - sampler_logp).masked_fill(~mask, 0)
    off = (gap.expm1().abs() > OFF_BY).sum().to(gap.dtype)
    return {MEAN: gap.abs().sum(), OFF: off, LARGEST: gap.abs().max()}


def truncated_importance_weights(logp: Tensor, sampler_logp: Tensor, cap: float) -> Tensor:
    """min(exp(logp - sampler_logp), cap), without gradient; any shape (Ionides 2008).

    It corrects for a sampler whose distribution differs from the policy's. `logp` is of the old
    policy, by the training forward; `sampler_logp` is of the distribution that tokens were drawn
    from.
    """
    return (logp.detach() - sampler_logp.detach()).exp().clamp(max=cap)


# --- intervals ------------------------------------------------------------------------------------


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
    """The mean of `[n, K]` values, K of each of n examples; NaN is left out."""
    known = ~np.isnan(values)
    counts, sums = known.sum(axis=1), np.where(known, values, 0.0).sum(axis=1, dtype=np.float64)
    each = sums[counts > 0] / counts[counts > 0]
    if not len(each):
        return Estimate(math.nan)
    if np.isin(each, (0, 1)).all():
        return wilson(float(each.mean()), len(each))
    return Estimate(float(each.mean()), *bootstrap(each))


def wilson(share: float, n: float) -> Estimate:
    """A share of n trials with Wilson's score interval (1927).

    Unlike the normal approximation, it stays within [0, 1] and is not empty at shares of 0 and 1.
    """
    scale = 1 + Z**2 / n
    center = (share + Z**2 / (2 * n)) / scale
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / scale
    return Estimate(share, max(0.0, center - half), min(1.0, center + half))


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """The percentile interval of the mean of `[n]` values; NaN for one value."""
    if len(values) < 2:
        return math.nan, math.nan
    return _percentiles([x for rows in _resampled(len(values), 0) for x in values[rows].mean(1)])


def summarise(
    summaries: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]],
    parts: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, Estimate]:
    """A task's summaries of `[n, K]` values of its parts; one that is not finite is left out."""
    found = summaries({name: values.flatten() for name, values in parts.items()})
    found = {name: float(value) for name, value in found.items() if math.isfinite(value)}
    if not found:
        return {}
    drawn: dict[str, list[float]] = {name: [] for name in found}
    for rows in itertools.chain.from_iterable(_resampled(len(next(iter(parts.values()))), seed)):
        again = summaries({name: values[rows].flatten() for name, values in parts.items()})
        for name in found.keys() & again.keys():
            drawn[name].append(float(again[name]))
    return {name: Estimate(value, *_percentiles(drawn[name])) for name, value in found.items()}


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, by Student's t; without an interval for a single seed."""
    x = np.asarray(values, dtype=float)
    degrees = len(x) - 1
    if not degrees:
        return Estimate(float(x[0]))
    known = degrees <= len(STUDENT_T)
    # else its expansion in powers of 1 / degrees (Abramowitz and Stegun, 26.7.5), within 1 %
    t = STUDENT_T[degrees - 1] if known else Z + 2.37 / degrees + 2.82 / degrees**2
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half)


def _resampled(n: int, seed: int) -> Iterator[np.ndarray]:
    """Rows of n examples, drawn with replacement, in blocks `[b, n]` that bound the memory.

    All measures have the same draws.
    """
    rng, size = stream(seed, "bootstrap"), max(1, BLOCK // n)
    for done in range(0, RESAMPLES, size):
        yield rng.integers(n, size=(min(size, RESAMPLES - done), n))


def _percentiles(drawn: Sequence[float]) -> tuple[float, float]:
    finite = [x for x in drawn if math.isfinite(x)]
    low, high = np.percentile(finite, (2.5, 97.5)) if finite else (math.nan, math.nan)
    return float(low), float(high)


# --- pass@k and the headline ----------------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is right, of which `num_correct` of `num_samples` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021, arXiv 2107.03374).
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right ones of {num_samples} does not exist")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def passes(right: np.ndarray) -> dict[str, Estimate]:
    """pass@k by its key, from `[n, K]` samples: 1 right, 0 wrong, NaN; none for K = 1.

    k is 1, the powers of two below K, and K.
    """
    num_samples = right.shape[1]
    if num_samples < 2:
        return {}
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    counts = [int(row.sum()) for row in right if not np.isnan(row).any()]
    found = {}
    for k in (*ks, num_samples):
        each = [pass_at_k(num_samples, count, k) for count in counts]
        found[f"{PASS_AT}{k}"] = estimate(np.array(each).reshape(-1, 1))
    return found


def headline(record: Mapping[str, object]) -> str:
    """The name of an evaluation's first measure, greedy; with SAMPLED, it is the sampled one."""
    found = (name for name in record if name.endswith(SAMPLED))
    return next(found, EXACT + SAMPLED).removesuffix(SAMPLED)


# --- two models on the same examples --------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Second minus first, over the examples that the measure concerns in both."""

    n: int
    first: float  # mean
    second: float
    low: float  # 95 % interval of the difference; NaN if there is none
    high: float
    p: float = math.nan  # NaN where the interval alone decides
    lost: int = 0  # examples that the first gets right more often
    won: int = 0

    @property
    def change(self) -> float:
        return self.second - self.first

    @property
    def is_shown(self) -> bool:
        """Whether these examples show a difference, at the 5 % level."""
        return self.low > 0 or self.high < 0 if math.isnan(self.p) else self.p < ALPHA


def difference(first: np.ndarray, second: np.ndarray) -> Difference | None:
    """Compare `[n]` or `[seeds, n]` values of the same n examples; None if none has both.

    Right or wrong: McNemar's exact test and the interval of Agresti and Min (2005). Other measures:
    the bootstrap. Seeds are averaged first: an example that is hard for one is hard for the other,
    so the same n examples are no more than n. McNemar's test is then the sign test.
    """
    both = np.stack([np.atleast_2d(first), np.atleast_2d(second)])  # [2, seeds, n]
    known = both[..., ~np.isnan(both).any(axis=(0, 1))]
    if not known.size:
        return None
    x, y = known.mean(axis=1)
    means = len(x), float(x.mean()), float(y.mean())
    if not np.isin(known, (0, 1)).all():
        return Difference(*means, *bootstrap(y - x))
    lost, won = int((x > y).sum()), int((x < y).sum())
    low, high = agresti_min(lost, won, len(x)) if known.shape[1] == 1 else bootstrap(y - x)
    return Difference(*means, low, high, mcnemar(lost, won), lost, won)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's exact test: a fair coin decides each discordant pair."""
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**n)


def agresti_min(lost: int, won: int, n: int) -> tuple[float, float]:
    """The interval of the difference of paired shares: Wald's, with 1/2 added to each cell."""
    total, center = n + 2, (won - lost) / (n + 2)
    half = Z * math.sqrt((won + lost + 1) / total - center**2) / math.sqrt(total)
    return max(-1.0, center - half), min(1.0, center + half)


# --- calibration ----------------------------------------------------------------------------------


def calibration(
    confidence: Sequence[float] | np.ndarray, correct: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """Measure how well `[n]` confidences in [0, 1] fit `[n]` outcomes, as RLCR does (2507.16806).

    Returns:
        brier: mean of (confidence - correct)^2; 0 is best.
        ece: the expected calibration error with ten bins (Naeini et al. 2015): the sum over bins of
            (share of the answers) x |mean confidence - share of right answers|. Chance adds to it
            and cannot cancel, so it is too large on average.
        auroc: the probability that a right answer has a higher confidence than a wrong one, where
            equal ones count one half. Left out if all answers are right, or all wrong.
    """
    q, c = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    if q.ndim != 1 or q.shape != c.shape or not q.size:
        raise ValueError(f"confidence and correct must be [n], got {q.shape} and {c.shape}")
    if not (((q >= 0) & (q <= 1)).all() and np.isin(c, (0, 1)).all()):
        raise ValueError("confidence must be in [0, 1], and correct 0 or 1")
    gaps = np.bincount(bins_of(q), weights=q - c)
    measures = {"brier": float(np.mean((q - c) ** 2)), "ece": float(np.abs(gaps).sum() / len(q))}
    if c.min() == c.max():
        return measures
    wrong, right = np.sort(q[c == 0]), q[c == 1]
    below = np.searchsorted(wrong, right, side="left")
    equal = np.searchsorted(wrong, right, side="right") - below
    return measures | {"auroc": float(np.sum(below + equal / 2) / (len(wrong) * len(right)))}


def bins_of(confidence: np.ndarray) -> np.ndarray:
    """The bin of each of `[n]` confidences: bin k is k/10 <= q < (k+1)/10, the last has 1 too."""
    # rounded, because 0.7 in float32 is 0.69999999, which would fall into the bin below
    return np.minimum(np.floor(np.round(confidence * NUM_BINS, 6)).astype(int), NUM_BINS - 1)

"""From rewards to advantages: what is added to rewards, and how groups are centred and scaled.

Rewards R and advantages A are `[P, G]`. rollout.py calls these.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .runtime.rng import stream
from .runtime.statistics import means
from .types import ROUNDINGS, ConfigError, Example

STD_EPS = 1e-4  # added to the standard deviation of rewards, as TRL does; ddof = 1
SCALES: dict[str, Callable[[Tensor], Tensor | float]] = {  # rewards [P, G] -> what divides
    "group": lambda rewards: rewards.std(-1, keepdim=True) + STD_EPS,
    "batch": lambda rewards: rewards.std() + STD_EPS,
    "mean": lambda rewards: rewards.mean(-1, keepdim=True),  # MaxRL, arXiv 2602.02710
    "none": lambda rewards: 1.0,  # Dr. GRPO, arXiv 2503.20783
}


def advantages(rewards: Tensor, *, estimator: str = "group_mean", scale: str = "group") -> Tensor:
    """Group-relative advantages: `[P, G]` -> `[P, G]`, in float32 or wider.

    The estimator `group_mean` is R_i - mean(R) (GRPO, arXiv 2402.03300); `leave_one_out` is R_i
    minus the mean of the others, G / (G - 1) times as much (RLOO, arXiv 2402.14740). `scale`, a row
    of SCALES, divides it; with `mean`, no reward may be negative. A group with equal rewards has
    advantages of exactly 0. They have no gradient.
    """
    size = rewards.shape[-1]
    if rewards.dim() != 2 or size < 2:
        raise ValueError(f"rewards must be [P, G] with G of at least 2, got {list(rewards.shape)}")
    if not rewards.isfinite().all() or (scale == "mean" and (rewards < 0).any()):
        raise ConfigError(
            "rewards must be finite; for --loss maxrl and --scale mean never negative"
        )
    rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    factor = {"group_mean": 1.0, "leave_one_out": size / (size - 1)}[estimator]
    centred = (rewards - rewards.mean(-1, keepdim=True)) * factor / SCALES[scale](rewards)
    # Eight rewards of 0.1 do not average to 0.1 in float32. Divided by a tiny std, that rounding
    # error would become a gradient.
    largest, least = rewards.amax(-1, keepdim=True), rewards.amin(-1, keepdim=True)
    rounding = ROUNDINGS * torch.finfo(rewards.dtype).eps
    equal = torch.isclose(largest, least, rtol=rounding, atol=0)
    return torch.where(equal, 0.0, centred)


def neutral(values: np.ndarray) -> np.ndarray:
    """`[P, G]` values, with NaN replaced so that it has no influence on advantages.

    It counts as the mean of its group, or as 0 in a group without any value.
    """
    of_groups = np.nan_to_num(means(values))[:, None]
    return np.where(np.isnan(values), of_groups, values)


def decoupled(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of rewards, `[P, G]` each, after each was centred and scaled by itself.

    GDPO (arXiv 2601.05242) then takes `advantages` with the scale `batch`.
    """
    centred = [
        x * advantages(torch.from_numpy(neutral(parts[name]))) for name, x in weights.items()
    ]
    return torch.stack(centred).sum(0)


def shuffled(total: Tensor, examples: Sequence[Example], seed: int, step: int) -> Tensor:
    """`[P, G]` rewards, shuffled within each group, so that they say nothing about the texts."""
    rows = [
        stream(seed, "shuffle", step, example.index).permutation(row)
        for example, row in zip(examples, total.numpy(), strict=True)
    ]
    return torch.from_numpy(np.stack(rows))


def overlong_punishment(lengths: Tensor, longest: int) -> Tensor:
    """DAPO's (arXiv 2503.14476): 0 up to four fifths of `longest`, then linearly down to -1."""
    buffer = longest / 5
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)

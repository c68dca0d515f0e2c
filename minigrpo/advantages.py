"""From rewards `[P, G]` to advantages `[P, G]`: how groups are centred and scaled."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .rng import stream
from .statistics import PartlyKnown, means
from .types import ConfigError, Example, are_equal

STD_EPS = 1e-4  # added to the standard deviation of rewards, as TRL does; ddof = 1
SCALES: dict[str, Callable[[Tensor], Tensor | float]] = {  # rewards [P, G] -> divisor
    "group": lambda rewards: rewards.std(-1, keepdim=True) + STD_EPS,
    "batch": lambda rewards: rewards.std() + STD_EPS,
    "mean": lambda rewards: rewards.mean(-1, keepdim=True),  # MaxRL, arXiv 2602.02710
    "none": lambda rewards: 1.0,  # Dr. GRPO, arXiv 2503.20783
}


def advantages(rewards: Tensor, *, estimator: str = "group_mean", scale: str = "group") -> Tensor:
    """Group-relative advantages: `[P, G]` -> `[P, G]`, in float32 or wider, without a gradient.

    The estimator `group_mean` is R_i - mean(R) (GRPO, arXiv 2402.03300). `leave_one_out` is R_i
    minus the mean of the others, which is G / (G - 1) times as much (RLOO, arXiv 2402.14740).
    `scale`, a row of SCALES, divides the difference; with `mean`, rewards may not be negative. A
    group with equal rewards has advantages of exactly 0.
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
    centred = rewards - rewards.mean(-1, keepdim=True)
    scaled = centred * factor / SCALES[scale](rewards)

    # Eight rewards of 0.1 do not average to 0.1 in float32. Divided by a tiny standard deviation,
    # that rounding error would become a gradient.
    return torch.where(are_equal(rewards)[:, None], 0.0, scaled)


def neutral(scores: PartlyKnown) -> np.ndarray:
    """`[P, G]` values, where those not known are their group's mean, or 0 if none is known."""
    return np.where(scores.known, scores.values, means(scores).values[:, None])


def shuffled(total: Tensor, examples: Sequence[Example], seed: int, step: int) -> Tensor:
    """`[P, G]` rewards, shuffled within each group, so that they say nothing about the texts."""
    rows = []
    for example, rewards in zip(examples, total.numpy(), strict=True):
        rng = stream(seed, "shuffle", step, example.index)
        rows.append(rng.permutation(rewards))
    return torch.from_numpy(np.stack(rows))

"""The metrics of a batch of completions, before the processes' are combined."""

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..types import Completions, RewardTable, RolloutBatch


def rollout_metrics(batch: RolloutBatch, stops: Collection[int]) -> dict[str, float]:
    """Metrics of a batch as it was sampled, under TRL's names where TRL has one.

    They are means over this process's prompts, or counts: `DistContext.combine` tells them apart.
    The mean of a reward part is over the completions that it concerns, NaN if there are none.
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


def mean_of(scores: np.ndarray) -> float:
    """The mean of a reward part over the completions that it concerns; NaN if there are none."""
    missing = np.isnan(scores)
    concerned = scores[~missing] if missing.any() else scores
    return float(concerned.mean()) if concerned.size else math.nan


def counts_of(batch: RolloutBatch) -> dict[str, int]:
    """How many values a mean is made of, by its name, where processes may differ in that.

    Completions that a reward part concerns, and tokens.
    """
    parts = batch.rewards.parts if batch.rewards else {}
    counts = {f"rewards/{name}/mean": int((~np.isnan(x)).sum()) for name, x in parts.items()}
    return counts | {"sampling/removed_mass": int(batch.completions.completion_mask.sum())}


def has_zero_variance(rewards: RewardTable) -> np.ndarray:
    """`[P]` bool: all completions of the prompt have equal rewards, which teach nothing."""
    return rewards.total.max(1) == rewards.total.min(1)


def has_ended(completions: Completions, stops: Collection[int]) -> Tensor:
    """`[P, G]` bool: the completion ends with a stop token; otherwise it was cut off."""
    last = (completions.completion_mask.sum(-1, keepdim=True) - 1).clamp(min=0)
    ends = torch.tensor(sorted(stops), dtype=torch.int64)
    return torch.isin(completions.completion_ids.gather(-1, last)[..., 0], ends)

"""What is measured of completions: the metrics of a step, and the scores of an evaluation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from .runtime.statistics import means
from .types import EXACT, REWARD, Dialogue, Example, RewardTable, RolloutBatch

SAMPLED = "_sampled"  # what the key of a measure of sampled completions ends with


def rollout_metrics(batch: RolloutBatch, stops: Collection[int]) -> dict[str, np.ndarray]:
    """The values of this process's batch by metric, under TRL's names where TRL has one.

    A metric is the mean of the values of all processes that are not NaN, or the sum of counts:
    see `DistContext.combine`.
    """
    completions = batch.completions
    mask = completions.completion_mask
    values: dict[str, ArrayLike | Tensor] = dict(batch.metrics)
    values["completions/mean_length"] = mask.sum(-1)
    if batch.rewards is not None:
        rewards = batch.rewards
        several = rewards.total.shape[1] > 1  # one alone may have a teacher
        values |= {
            "reward": rewards.total,
            "reward_std": rewards.total.std(axis=1, ddof=int(several)),
            "frac_reward_zero_std": rewards.zero_variance,
            **{f"rewards/{name}/mean": scores for name, scores in rewards.parts.items()},
            **{f"rewards/{name}/failures": failed for name, failed in rewards.failed.items()},
        }
        values["completions/clipped_ratio"] = ~batch.ended(stops)
        values |= dialogue_metrics(batch.texts)
    if completions.log_kept_mass is not None:
        values["sampling/removed_mass"] = 1 - completions.log_kept_mass[mask].exp()
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


def dialogue_metrics(texts: Sequence[Sequence[str]]) -> dict[str, ArrayLike]:
    """The metrics of completions with several turns; none if there are none."""
    dialogues = [text for group in texts for text in group if isinstance(text, Dialogue)]
    if not dialogues:
        return {}
    return {
        "dialogues/turns": [one.turns for one in dialogues],
        "dialogues/cut_ratio": [one.cut for one in dialogues],
        "tools/call_frequency": [len(one.failed_calls) for one in dialogues],
        "tools/failure_frequency": [failed for one in dialogues for failed in one.failed_calls],
    }


@dataclass(frozen=True)
class Graded:
    """K completions of each of n evaluation examples, and their scores."""

    examples: Sequence[Example]  # [n]
    texts: Sequence[Sequence[str]]  # [n][K]
    rewards: RewardTable  # [n, K]
    # the part that says which are right; EXACT, if it is no part: equal to the answer; REWARD: none
    success: str

    @property
    def right(self) -> np.ndarray:
        """`[n, K]`: 1 for a right completion, else 0; NaN where that concerns no example."""
        if self.success == REWARD:
            return np.full_like(self.rewards.total, np.nan)
        if self.success in self.rewards.parts:
            scores = self.rewards.parts[self.success]
            failed = self.rewards.failed.get(self.success, np.False_)
            return np.where(np.isnan(scores) & ~failed, np.nan, (scores == 1) & ~failed)
        pairs = zip(self.examples, self.texts, strict=True)
        same = [[text == example.answer for text in group] for example, group in pairs]
        return np.array(same, dtype=float)

    @cached_property
    def measures(self) -> dict[str, np.ndarray]:
        """Each measure of the `[n]` examples, a mean over their completions; the headline first."""
        others = {name: x for name, x in self.rewards.parts.items() if name != self.success}
        values = {self.success: self.right, **others} | {REWARD: self.rewards.total}
        return {name: means(of_completions) for name, of_completions in values.items()}


def headline(record: Mapping[str, object]) -> str:
    """The name of an evaluation's first measure, greedy; with SAMPLED, it is the sampled one."""
    return next((x for x in record if x.endswith(SAMPLED)), EXACT).removesuffix(SAMPLED)

"""What is measured of completions: the metrics of a step, and the scores of an evaluation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .runtime.statistics import means
from .types import EXACT, REWARD, Dialogue, Example, RewardTable, RolloutBatch

SAMPLED = "_sampled"  # what the key of a measure of sampled completions ends with


def rollout_metrics(batch: RolloutBatch, stops: Collection[int]) -> dict[str, np.ndarray]:
    """The values of this process's batch by metric, under TRL's names where TRL has one.

    A metric is the mean of the values of all processes that are not NaN, or the sum of counts:
    see `DistContext.combine`.
    """
    mask = batch.completions.completion_mask
    values: dict[str, Any] = {**batch.metrics, "completions/mean_length": mask.sum(-1)}
    if (rewards := batch.rewards) is not None:
        values["reward"] = rewards.total
        several = rewards.total.shape[1] > 1  # one alone may have a teacher
        values["reward_std"] = rewards.total.std(axis=1, ddof=int(several))
        values["frac_reward_zero_std"] = rewards.zero_variance
        values |= {f"rewards/{name}/mean": x for name, x in rewards.parts.items()}
        values |= {f"rewards/{name}/failures": n for name, n in rewards.failures.items()}
        values["completions/clipped_ratio"] = ~batch.completions.ended(stops)
        if dialogues := [x for group in batch.texts for x in group if isinstance(x, Dialogue)]:
            values["dialogues/turns"] = [x.turns for x in dialogues]
            values["dialogues/cut_ratio"] = [x.cut for x in dialogues]
            calls = [sum(y["role"] == "tool" for y in x.messages) for x in dialogues]
            values["tools/call_frequency"] = calls
    if (log_kept_mass := batch.completions.log_kept_mass) is not None:
        values["sampling/removed_mass"] = 1 - log_kept_mass[mask].exp()
    return {name: np.asarray(x, dtype=np.float64) for name, x in values.items()}


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
        if (scores := self.rewards.parts.get(self.success)) is not None:
            return np.where(np.isnan(scores), np.nan, scores == 1)
        pairs = zip(self.examples, self.texts, strict=True)
        same = [[text == example.answer for text in group] for example, group in pairs]
        return np.array(same, dtype=float)

    @cached_property
    def measures(self) -> dict[str, np.ndarray]:
        """Each measure of the `[n]` examples, a mean over their completions; the headline first."""
        parts = {name: x for name, x in self.rewards.parts.items() if name != self.success}
        values = {self.success: self.right, **parts} | {REWARD: self.rewards.total}
        return {name: means(x) for name, x in values.items()}


def headline(record: Mapping[str, object]) -> str:
    """The name of an evaluation's first measure, greedy; with SAMPLED, it is the sampled one."""
    return next((x for x in record if x.endswith(SAMPLED)), EXACT).removesuffix(SAMPLED)

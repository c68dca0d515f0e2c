"""What is measured of completions: the metrics of a step, and the scores of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from .statistics import PartlyKnown, means
from .types import EXACT, REWARD, Completion, Example, PerPrompt, RewardTable, RolloutBatch

SAMPLED = "_sampled"  # the end of the key of a measure of sampled completions


def rollout_metrics(batch: RolloutBatch) -> dict[str, np.ndarray]:
    """The known values of this process's batch by metric, under TRL's names where TRL has one.

    `DistContext.combine` makes means, or sums of counts, of those of all processes.
    """
    completions = batch.completions
    mask = completions.completion_mask
    values: dict[str, ArrayLike | Tensor] = dict(batch.metrics)
    values["completions/mean_length"] = mask.sum(-1)
    rewards = batch.rewards
    if rewards is not None:
        known_groups = rewards.total[rewards.total_known.all(axis=1)]
        is_alone = rewards.total.shape[1] == 1  # a single completion may have a teacher
        values["reward"] = rewards.total[rewards.total_known]
        values["reward_std"] = known_groups.std(axis=1, ddof=0 if is_alone else 1)
        values["frac_reward_zero_std"] = rewards.zero_variance
        for name, scores in rewards.scores.items():
            values[f"rewards/{name}/mean"] = scores.known_values
            values[f"rewards/{name}/failures"] = scores.failed
        values["completions/clipped_ratio"] = ~batch.ended
        values |= dialogue_metrics(batch.texts)
    if completions.log_kept_mass is not None:
        values["sampling/removed_mass"] = 1 - completions.log_kept_mass[mask].exp()
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


def dialogue_metrics(texts: Sequence[Sequence[Completion]]) -> dict[str, ArrayLike]:
    """The metrics of completions with several turns, without values if there are none."""
    dialogues = [text for group in texts for text in group if text.is_dialogue]
    calls = [one.failed_calls for one in dialogues if one.failed_calls is not None]
    return {
        "dialogues/turns": [one.turns for one in dialogues],
        "dialogues/cut_ratio": [one.cut for one in dialogues],
        "tools/call_frequency": [*map(len, calls)],
        "tools/failure_frequency": [*chain(*calls)],
    }


@dataclass(frozen=True)
class Graded(PerPrompt):
    """K completions of each of n evaluation examples, and their scores."""

    examples: Sequence[Example]  # [n]
    texts: Sequence[Sequence[Completion]]  # [n][K]
    rewards: RewardTable  # [n, K]
    # the reward that says which completions are right; EXACT without such a reward means that they
    # equal the answer; REWARD means that nothing says so
    success: str

    @property
    def right(self) -> PartlyKnown:
        """`[n, K]`: 1 for a right completion, else 0. A completion that failed is wrong."""
        shape = self.rewards.total.shape
        if self.success == REWARD:
            return PartlyKnown(np.zeros(shape), np.zeros(shape, dtype=bool))
        if self.success in self.rewards.scores:
            scores = self.rewards.scores[self.success]
            is_right = scores.known & ~scores.failed & (scores.values == 1)
            return PartlyKnown(is_right.astype(float), scores.applies)
        pairs = zip(self.examples, self.texts, strict=True)
        same = [[text == example.answer for text in group] for example, group in pairs]
        return PartlyKnown(np.array(same, dtype=float), np.ones(shape, dtype=bool))

    @cached_property
    def measures(self) -> dict[str, PartlyKnown]:
        """Each measure of the `[n]` examples, a mean over their completions; the headline first."""
        numbers: dict[str, PartlyKnown] = {self.success: self.right}
        for name, scores in self.rewards.scores.items():
            numbers.setdefault(name, scores)
        numbers[REWARD] = PartlyKnown(self.rewards.total, self.rewards.total_known)
        return {name: means(of_completions) for name, of_completions in numbers.items()}


def headline(record: Mapping[str, object]) -> str:
    """The name of an evaluation's first measure, greedy; with SAMPLED, it is the sampled one."""
    return next((x for x in record if x.endswith(SAMPLED)), EXACT).removesuffix(SAMPLED)

"""Completions of evaluation examples with their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from ..types import Example, RewardTable


@dataclass(frozen=True)
class Graded:
    """K completions of each of n examples, and their scores."""

    examples: Sequence[Example]  # [n]
    texts: Sequence[Sequence[str]]  # [n][K]
    rewards: RewardTable  # [n, K]
    success: str  # the part that says which are right

    @property
    def right(self) -> np.ndarray:
        """`[n, K]`: 1 for a right completion, else 0; NaN where that concerns no example."""
        if (scores := self.rewards.parts.get(self.success)) is not None:
            return np.where(np.isnan(scores), np.nan, scores == 1)
        pairs = zip(self.examples, self.texts, strict=True)
        same = [[text == example.answer for text in group] for example, group in pairs]
        return np.array(same, dtype=float)

    def select(self, rows: np.ndarray) -> "Graded":
        """Some of the examples, by an `[n]` bool mask."""
        return replace(
            self,
            examples=list(compress(self.examples, rows)),
            texts=list(compress(self.texts, rows)),
            rewards=self.rewards.select(rows),
        )

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """The `[n, K]` values of all measures that are means; the success comes first."""
        parts = {name: x for name, x in self.rewards.parts.items() if name != self.success}
        return {self.success: self.right, **parts, "reward": self.rewards.total}

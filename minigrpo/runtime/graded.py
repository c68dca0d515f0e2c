"""Completions of evaluation examples with their scores."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from ..types import Example, RewardTable


def doubts(*graded: "Graded") -> Iterator[str]:
    """What is to be said of the scores of an evaluation, because its measures do not show it."""
    failed, odd = Counter[str](), 0
    total = sum(one.rewards.total.size for one in graded)
    for one in graded:
        failed.update(one.rewards.failures)
        scores = one.rewards.parts.get(one.success, np.zeros(0))
        odd += int((~np.isnan(scores) & (scores != 0) & (scores != 1)).sum())
    for part, number in failed.items():
        if number:
            yield f"reward {part} failed on {number} of {total} completions, which get its floor"
    if odd:
        yield (
            f"{graded[0].success} says which completions are right, and was neither 1 nor 0 for "
            f"{odd} of {total}, which count as wrong"
        )


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

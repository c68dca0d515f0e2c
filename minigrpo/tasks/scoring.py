"""The base class of tasks that score many completions in one call."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from ..types import Example


class BatchScored(ABC):
    """Scores completions with `score_batch`; a single one is a batch of one.

    The scorer trusts `score_batch`: it is called without a time limit, and an error ends the run.
    """

    parts: Mapping[str, float]  # reward part -> default weight

    @abstractmethod
    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Score n texts, each against the example at its place.

        Returns:
            For every part of `parts`, n scores in [0, 1], for any text, or NaN where the part does
            not concern the example; the true answer scores 1 in each other part.
        """

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Score one text: every part of `parts`, in [0, 1]."""
        scores = self.score_batch([example], [text])
        return {name: float(values[0]) for name, values in scores.items()}

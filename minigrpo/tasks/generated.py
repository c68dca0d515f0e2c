"""What tasks that make their own examples share."""

from abc import ABC, abstractmethod

from ..types import Example


class Generated(ABC):
    """An endless supply of examples, each a pure function of (seed, split, number)."""

    num_held_out: int | None = None

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._example("train", number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`: a question that training never asks."""
        return self._example("held-out", number)

    @abstractmethod
    def _example(self, split: str, number: int) -> Example:
        """Return an example of a split, "train" or "held-out"."""

"""Chess questions of both kinds, taken in turn from any number of sources.

The prefix of a prompt selects the scorer of its completions. A reward part of the other scorer does
not concern the question: its score is NaN, which counts 0 in the total and is left out of means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..types import Example
from .files import ExampleSource
from .scoring import BatchScored


class Mixed(BatchScored):
    """A task made of example sources, which take turns."""

    def __init__(
        self, sources: Sequence[ExampleSource], scored_by: Mapping[str, BatchScored]
    ) -> None:
        """`scored_by`: prompt prefix -> the scorer of such prompts' completions."""
        self.sources, self.scored_by = sources, scored_by
        self.parts = {
            name: weight for scorer in scored_by.values() for name, weight in scorer.parts.items()
        }
        # the smallest source limits the number, so that no question is evaluated twice
        sizes = [source.num_held_out for source in sources if source.num_held_out]
        self.num_held_out = len(sources) * min(sizes) if sizes else None

    def train(self, number: int) -> Example:
        """Return training example `number`, from source `number % len(sources)`."""
        turn, source = divmod(number, len(self.sources))
        return replace(self.sources[source].train(turn), index=number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`, from source `number % len(sources)`."""
        turn, source = divmod(number, len(self.sources))
        return replace(self.sources[source].held_out(turn), index=number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        scores = {name: np.full(len(texts), np.nan, dtype=np.float32) for name in self.parts}
        for prefix, scorer in self.scored_by.items():
            rows = [i for i, example in enumerate(examples) if example.prompt.startswith(prefix)]
            if rows:
                found = scorer.score_batch([examples[i] for i in rows], [texts[i] for i in rows])
                for name, values in found.items():
                    scores[name][rows] = values
        return scores

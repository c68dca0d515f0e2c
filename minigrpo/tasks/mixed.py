"""Chess questions of both kinds and from any source, in turns; the head of a prompt says who judges
the answer.

A part that does not concern a question is 1 for whatever is written: the same for a whole group, so
it moves no advantage. (And truth scores 1 in every part, as the protocol says; a mean over a mixed
batch counts those ones in.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..types import Example
from .files import Source


class Judge(Protocol):
    parts: Mapping[str, float]

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]: ...


class Mixed:
    """A task made of sources of questions, and of judges by the head of the prompt."""

    def __init__(self, sources: Sequence[Source], judges: Mapping[str, Judge]) -> None:
        self.sources, self.judges = sources, judges
        self.parts: Mapping[str, float] = {
            name: weight for judge in judges.values() for name, weight in judge.parts.items()
        }
        sizes = [source.num_held_out for source in sources if source.num_held_out]
        self.num_held_out = (
            len(sources) * min(sizes) if sizes else None
        )  # so that none is asked twice

    def train(self, number: int) -> Example:
        turn, source = divmod(number, len(self.sources))
        return replace(self.sources[source].train(turn), index=number)

    def held_out(self, number: int) -> Example:
        turn, source = divmod(number, len(self.sources))
        return replace(self.sources[source].held_out(turn), index=number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        scores = {name: np.ones(len(texts), dtype=np.float32) for name in self.parts}
        for head, judge in self.judges.items():
            rows = [i for i, example in enumerate(examples) if example.prompt.startswith(head)]
            if rows:
                found = judge.score_batch([examples[i] for i in rows], [texts[i] for i in rows])
                for name, values in found.items():
                    scores[name][rows] = values
        return scores

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {
            name: float(values[0]) for name, values in self.score_batch([example], [text]).items()
        }

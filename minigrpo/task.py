"""The interface of a task: where prompts come from, and how completions are scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import EXACT, Completions, Example


@dataclass(frozen=True)
class TokenBatch:
    """What a reward function of tokens sees: a copy, which it may change."""

    examples: Sequence[Example]  # [P]
    texts: Sequence[Sequence[str]]  # [P][G]
    completions: Completions  # sampler_logp [P, G, S] has the policy's log-probs
    temperature: float  # of the samples: sampler_logp is of logits / temperature
    decode: Callable[[Sequence[int]], str]  # of the policy's tokenizer
    model: Callable[[str], Any]  # a frozen model by name: see model/frozen_model.py


class Task:
    """An endless supply of prompts, and scores for completions. A task of your own subclasses it.

    A task is made with the arguments that its `__init__` names, out of `seed`, `data`, `eval_data`
    (lists of paths or rows), `chat` (whether --system makes prompts messages) and --task-args.
    A value of a part may be None: the part does not concern the example. NaN is a failure.
    """

    parts: Mapping[str, float] = {}  # reward function -> weight in the total
    # the part that is 1 for a right completion; EXACT and REWARD (nothing is right) need no part
    success: str = EXACT
    num_held_out: int | None = None  # distinct evaluation examples; None: endless
    num_known: int = 0  # examples that `known` gives; 0: endless
    about: str = ""  # what the examples are and how they are scored, printed when a run starts
    token_parts: Sequence[str] = ()  # the parts that `score_tokens` gives
    speculate: bool = False  # whether completions resemble the answer: propose its tokens
    # the environment, and the tools, of completions with several turns: see turns/
    environment: type[Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()
    # 64-bit hashes of the training and the held-out questions; None: questions are made by a seed
    questions: tuple[np.ndarray, np.ndarray] | None = None

    def train(self, number: int) -> Example:
        """Training example `number`: a pure function of (seed, number), in shuffled order."""
        raise NotImplementedError

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; training never sees it."""
        raise NotImplementedError

    def known(self, number: int) -> Example:
        """Example `number` of both splits; a run first checks that all of them fit the model."""
        raise NotImplementedError

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part's value for any text; a true answer scores highest."""
        return {}

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> Mapping[str, Sequence[float]]:
        """`score` of n (example, text) pairs: part -> n values."""
        rows = [self.score(example, text) for example, text in zip(examples, texts, strict=True)]
        names = [name for name in self.parts if name not in self.token_parts]
        return {name: [row[name] for row in rows] for name in names}

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """The values `[P, G]` of `token_parts`."""
        return {}

    def summaries(self, parts: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """More measures of an evaluation than means, from the `[n]` values of each part."""
        return {}

"""The interface of a task: where prompts come from, and how completions are scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import EXACT, Completion, Completions, Example


@dataclass(frozen=True)
class TokenBatch:
    """The argument of a reward function of tokens: a copy, which the function may change."""

    examples: Sequence[Example]  # [P]
    texts: Sequence[Sequence[Completion]]  # [P][G]
    completions: Completions  # sampler_logp [P, G, S] has the policy's log-probs
    temperature: float  # divides the logits in sampler_logp
    decode: Callable[[Sequence[int]], str]  # gives the text of tokens
    model: Callable[[str], Any]  # gives a frozen model by its name, see model/frozen_model.py


class Task:
    """An endless supply of prompts, and scores for completions. A task of your own subclasses it.

    `__init__` may name `seed`, `data`, `eval_data` (lists of paths or rows), `chat` (whether
    --system makes prompts messages) and --task-args, and gets those that it names. A reward is None
    if it does not concern the example, and NaN if it failed.
    """

    reward_weights: Mapping[str, float] = {}  # reward -> its weight in the total
    # the reward that is 1 for a right completion; EXACT and REWARD (nothing is right) are not among
    # the task's rewards
    success: str = EXACT
    num_held_out: int | None = None  # number of distinct evaluation examples, None if endless
    about: str = ""  # line about the examples and their scores, printed when a run starts
    token_rewards: Sequence[str] = ()  # rewards that `score_tokens` gives
    speculate: bool = False  # whether to propose the answer's tokens, which completions resemble
    # environment and tools of completions with several turns, see turns/
    environment: type[Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()

    def train(self, number: int) -> Example:
        """Training example `number`, a pure function of (seed, number), in shuffled order."""
        raise NotImplementedError

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; training never sees it."""
        raise NotImplementedError

    def known(self) -> Sequence[Example]:
        """All examples of both splits, unless there is no end of them: a run first checks each."""
        return ()

    def score(self, example: Example, text: str) -> Mapping[str, float | None]:
        """Every reward for any text; a true answer scores highest."""
        return {}

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """The scores `[P, G]` of `token_rewards`."""
        return {}

    def summaries(self, values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Further metrics of an evaluation, from `[n]` values of each reward, NaN without one."""
        return {}

"""The nouns that pass between modules: frozen, with the shape on the line of each field.

P prompts, G completions of each, S new tokens at most. There is no left padding, and a prompt is stored once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One question and its truth."""

    prompt: str
    answer: str
    index: int = 0  # place in the task's endless sequence; keys the random numbers of its completions
    kind: str = ""  # what sort of question this is; evaluation reports by kind


class Task(Protocol):
    """Prompts without end, and scores for completions. A task of one's own implements this."""

    name: str
    parts: Mapping[str, float]  # reward part -> default weight

    def train(self, number: int) -> Example:
        """Training example `number`, a pure function of (seed, number), in an order that mixes well."""

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; never one that training sees."""

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part, each in [0, 1], for any text whatsoever; the truth scores 1 in each."""


@dataclass(frozen=True)
class Completions:
    """What was sampled (or, in the supervised warm start, what is true)."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row a prompt, never repeated
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s of every row is its s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true up to and including EOS; from lengths, never from a pad id
    sampler_logp: Tensor | None = None  # [P, G, S] float32, what the sampler drew from; None when nothing was sampled

    def __len__(self) -> int:
        return len(self.prompt_len)

    def select(self, prompts: Tensor) -> "Completions":
        """Some of the prompts with all of their completions: a group is never split."""
        return self._each(lambda x: x[prompts])

    def to(self, device: torch.device | str) -> "Completions":
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Completions":
        changed: dict[str, Any] = {name: None if x is None else change(x) for name, x in vars(self).items()}
        return Completions(**changed)


@dataclass(frozen=True)
class RewardTable:
    """Scores of P x G texts, each part in [0, 1]; `total` is their weighted sum."""

    total: np.ndarray  # [P, G] float32
    parts: Mapping[str, np.ndarray]  # name -> [P, G] float32


@dataclass(frozen=True)
class RolloutBatch:
    """All that one optimizer step needs to know."""

    examples: Sequence[Example]  # P of them
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without EOS
    rewards: RewardTable | None = None  # None in the supervised warm start
    advantages: Tensor | None = None  # [P, G] float32, constant within a completion
    old_logp: Tensor | None = None  # [P, G, S] float32; None: the policy that is being updated is the one that sampled
    ref_logp: Tensor | None = None  # [P, G, S] float32; None: no KL term in the loss

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, prompts: Sequence[int]) -> "RolloutBatch":
        """Some of the prompts with all of their completions. Rewards, which belong to the whole batch, stay behind."""
        rows = torch.as_tensor(prompts)
        tensors = ("advantages", "old_logp", "ref_logp")
        return replace(
            self,
            examples=[self.examples[p] for p in prompts],
            texts=[self.texts[p] for p in prompts],
            completions=self.completions.select(rows),
            rewards=None,
            **{name: None if getattr(self, name) is None else getattr(self, name)[rows] for name in tensors},
        )

    def split(self, num_prompts: int) -> list["RolloutBatch"]:
        """Micro-batches of at most `num_prompts` prompts, whole groups each."""
        return [self.select(range(a, min(a + num_prompts, len(self)))) for a in range(0, len(self), num_prompts)]

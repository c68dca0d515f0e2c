"""The nouns that pass between modules: frozen, with the shape on the line of each field.

P prompts, G completions of each, S new tokens at most. There is no left padding, and a prompt is
stored once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One question and its truth."""

    prompt: str
    answer: str
    index: int = (
        0  # place in the task's endless sequence; keys the random numbers of its completions
    )
    kind: str = ""  # what sort of question this is; evaluation reports by kind


class Task(Protocol):
    """Prompts without end, and scores for completions. A task of one's own implements this."""

    parts: Mapping[str, float]  # reward part -> default weight
    # Optional: num_held_out, how many different evaluation examples there are. And
    # score_batch(examples, texts) -> {part: values}, by which a task vouches for its scoring: it is
    # called with many texts at once, and without a time limit.

    def train(self, number: int) -> Example:
        """Training example `number`, a pure function of (seed, number), in an order that mixes
        well.
        """

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; never one that training sees."""

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part, each in [0, 1], for any text whatsoever; the truth scores 1 in each."""


@dataclass(frozen=True)
class Completions:
    """What was sampled (or, in the supervised warm start, what is true)."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row a prompt, never repeated
    prompt_len: Tensor  # [P] int64
    completion_ids: (
        Tensor  # [P, G, S] int64, right-padded; column s of every row is its s-th new token
    )
    completion_mask: (
        Tensor  # [P, G, S] bool, true up to and including EOS; from lengths, never from a pad id
    )
    sampler_logp: Tensor | None = (
        None  # [P, G, S] float32, by the sampler's forward; None when nothing was sampled
    )
    log_kept_mass: Tensor | None = (
        None  # [P, G, S] float32, log of the mass that top-k and top-p left; None: all of it
    )

    def __len__(self) -> int:
        return len(self.prompt_len)

    def select(self, prompts: Tensor) -> "Completions":
        """Some of the prompts with all of their completions: a group is never split."""
        return self._each(lambda x: x[prompts])

    @staticmethod
    def join(parts: Sequence["Completions"]) -> "Completions":
        """Completions of one batch of prompts after another, as one, padded to the longest."""

        def joined(name: str) -> Tensor | None:
            tensors = [getattr(part, name) for part in parts]
            if any(x is None for x in tensors):
                return None
            longest = max(x.shape[-1] for x in tensors)
            if tensors[0].dim() > 1:
                tensors = [torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in tensors]
            return torch.cat(tensors)

        fields: dict[str, Any] = {name: joined(name) for name in vars(parts[0])}
        return Completions(**fields)

    def to(self, device: torch.device | str) -> "Completions":
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Completions":
        changed: dict[str, Any] = {
            name: None if x is None else change(x) for name, x in vars(self).items()
        }
        return Completions(**changed)


@dataclass(frozen=True)
class RewardTable:
    """Scores of P x G texts, each part in [0, 1]; `total` is their weighted sum."""

    total: np.ndarray  # [P, G] float32
    parts: Mapping[str, np.ndarray]  # name -> [P, G] float32
    failures: Mapping[str, int] = field(
        default_factory=dict
    )  # part that can fail -> completions that it failed on

    @staticmethod
    def join(tables: Sequence["RewardTable"]) -> "RewardTable":
        """Tables of one batch of prompts after another, as one."""
        parts = {
            name: np.concatenate([table.parts[name] for table in tables])
            for name in tables[0].parts
        }
        failures = {
            name: sum(table.failures[name] for table in tables) for name in tables[0].failures
        }
        return RewardTable(np.concatenate([table.total for table in tables]), parts, failures)

    def select(self, rows: np.ndarray) -> "RewardTable":
        """Some of the prompts; failures stay counted."""
        return RewardTable(
            self.total[rows], {name: x[rows] for name, x in self.parts.items()}, self.failures
        )


@dataclass(frozen=True)
class RolloutBatch:
    """All that one optimizer step needs to know."""

    examples: Sequence[Example]  # P of them
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without EOS
    rewards: RewardTable | None = None  # None in the supervised warm start
    advantages: Tensor | None = None  # [P, G] float32, constant within a completion
    old_logp: Tensor | None = (
        # [P, G, S] float32, before the first of several inner steps; None: a ratio of exactly 1
        None
    )
    ref_logp: Tensor | None = None  # [P, G, S] float32; None: no KL term in the loss
    loss_mask: Tensor | None = None  # [P, G] bool, completions that the loss sees; None: all
    metrics: Mapping[str, float] = field(
        default_factory=dict
    )  # what else there is to log about how it came about

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, prompts: Sequence[int]) -> "RolloutBatch":
        """Some of the prompts with all of their completions. Rewards, which belong to the whole
        batch, stay behind.
        """
        rows = torch.as_tensor(prompts)
        chosen: dict[str, Any] = {}
        for name in ("advantages", "old_logp", "ref_logp", "loss_mask"):
            chosen[name] = None if getattr(self, name) is None else getattr(self, name)[rows]
        return replace(
            self,
            examples=[self.examples[p] for p in prompts],
            texts=[self.texts[p] for p in prompts],
            completions=self.completions.select(rows),
            rewards=None,
            **chosen,
        )

    def counted(self) -> "RolloutBatch":
        """The same without a token of the completions that the loss does not see."""
        if self.loss_mask is None:
            return self
        mask = self.completions.completion_mask & self.loss_mask[..., None]
        return replace(
            self, completions=replace(self.completions, completion_mask=mask), loss_mask=None
        )

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]`, under the distribution that tokens were drawn from: top-k and top-p give
        what they keep more mass.
        """
        logp, log_kept_mass = self.completions.sampler_logp, self.completions.log_kept_mass
        return logp if logp is None or log_kept_mass is None else logp - log_kept_mass

    def split(self, num_prompts: int) -> list["RolloutBatch"]:
        """Micro-batches of at most `num_prompts` prompts, whole groups each."""
        return [
            self.select(range(a, min(a + num_prompts, len(self))))
            for a in range(0, len(self), num_prompts)
        ]

"""The data that passes between modules: frozen, with the shape on the line of each field.

P prompts, G completions per prompt, S new tokens at most. Prompts are stored once per group, and
there is no left padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """A question and its true answer."""

    prompt: str
    answer: str
    index: int = 0  # place in the task's endless sequence; keys the completions' random numbers
    kind: str = ""  # what sort of question this is; evaluation reports by kind


class Task(Protocol):
    """Prompts without end, and scores for completions. A task of your own implements this.

    Two attributes are optional. `num_held_out` is the number of distinct evaluation examples.
    `score_batch(examples, texts) -> {part: values}` scores many texts at once; a task that has it
    vouches for it, so it runs without a time limit.
    """

    parts: Mapping[str, float]  # reward part -> default weight

    def train(self, number: int) -> Example:
        """Training example `number`: a pure function of (seed, number), in an order that mixes."""

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`, which training never sees."""

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every reward part, each in [0, 1], for any text whatever. The true answer scores 1."""


@dataclass(frozen=True)
class Completions:
    """Completions that were sampled, or the true answers in the supervised warm start."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true up to and including EOS, from lengths
    sampler_logp: Tensor | None = None  # [P, G, S] float32, of the sampler's own forward
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of what top-k and top-p kept

    def __len__(self) -> int:
        return len(self.prompt_len)

    def select(self, prompts: Tensor) -> "Completions":
        """Some of the prompts with all of their completions: a group is never split."""
        return self._each(lambda x: x[prompts])

    @staticmethod
    def join(parts: Sequence["Completions"]) -> "Completions":
        """Several batches of prompts as one, padded to the longest."""

        def joined(name: str) -> Tensor | None:
            tensors = [getattr(part, name) for part in parts]
            if any(x is None for x in tensors):
                return None
            longest = max(x.shape[-1] for x in tensors)
            if tensors[0].dim() > 1:
                pad = torch.nn.functional.pad
                tensors = [pad(x, (0, longest - x.shape[-1])) for x in tensors]
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
    failures: Mapping[str, int] = field(default_factory=dict)  # part -> completions it failed on

    @staticmethod
    def join(tables: Sequence["RewardTable"]) -> "RewardTable":
        """The tables of several batches of prompts as one."""
        parts = {name: np.concatenate([t.parts[name] for t in tables]) for name in tables[0].parts}
        failures = {name: sum(t.failures[name] for t in tables) for name in tables[0].failures}
        return RewardTable(np.concatenate([table.total for table in tables]), parts, failures)

    def select(self, rows: np.ndarray) -> "RewardTable":
        """Some of the prompts. Failures stay counted."""
        parts = {name: x[rows] for name, x in self.parts.items()}
        return RewardTable(self.total[rows], parts, self.failures)


PER_COMPLETION = ("advantages", "old_logp", "ref_logp", "loss_mask")


@dataclass(frozen=True)
class RolloutBatch:
    """All that an optimizer step needs."""

    examples: Sequence[Example]  # [P]
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without EOS
    rewards: RewardTable | None = None  # None in the supervised warm start
    advantages: Tensor | None = None  # [P, G] float32, constant within a completion
    old_logp: Tensor | None = None  # [P, G, S] float32, before the first inner step; None: ratio 1
    ref_logp: Tensor | None = None  # [P, G, S] float32; None: no KL term in the loss
    loss_mask: Tensor | None = None  # [P, G] bool, completions that enter the loss; None: all
    metrics: Mapping[str, float] = field(default_factory=dict)  # what to log about the rollout

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, prompts: Sequence[int]) -> "RolloutBatch":
        """Some of the prompts with all of their completions, without their rewards."""
        rows = torch.as_tensor(prompts)
        return replace(
            self._each(lambda x: x[rows]),
            examples=[self.examples[p] for p in prompts],
            texts=[self.texts[p] for p in prompts],
            completions=self.completions.select(rows),
            rewards=None,
        )

    def split(self, num_prompts: int) -> list["RolloutBatch"]:
        """Micro-batches of at most `num_prompts` prompts, whole groups each."""
        starts = range(0, len(self), num_prompts)
        return [self.select(range(a, min(a + num_prompts, len(self)))) for a in starts]

    def to(self, device: torch.device | str) -> "RolloutBatch":
        moved = self._each(lambda x: x.to(device))
        return replace(moved, completions=self.completions.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "RolloutBatch":
        tensors = {name: getattr(self, name) for name in PER_COMPLETION}
        changed: dict[str, Any] = {
            name: None if x is None else change(x) for name, x in tensors.items()
        }
        return replace(self, **changed)

    def with_loss_mask_applied(self) -> "RolloutBatch":
        """The same batch with the tokens of left-out completions masked."""
        if self.loss_mask is None:
            return self
        mask = self.completions.completion_mask & self.loss_mask[..., None]
        masked = replace(self.completions, completion_mask=mask)
        return replace(self, completions=masked, loss_mask=None)

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]`, under the distribution that tokens were drawn from.

        Top-k and top-p give more mass to the tokens that they keep.
        """
        logp, log_kept_mass = self.completions.sampler_logp, self.completions.log_kept_mass
        return logp if logp is None or log_kept_mass is None else logp - log_kept_mass

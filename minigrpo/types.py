"""The data that modules pass to each other: frozen dataclasses, each tensor with its shape.

P prompts, of at most Lp tokens; G completions per prompt, of at most S tokens. Prompts are stored
once per group, and padding is always on the right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """A prompt and its true answer. In a chat, `prompt` is the question that `messages` ask."""

    prompt: str
    answer: str
    index: int = 0  # place in the task's endless sequence; the key of its random numbers
    kind: str = ""  # kind of question, by which evaluation reports
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)  # role, content
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # all keys of a data line


class Task(Protocol):
    """An endless supply of prompts, and scores for completions. Implement this for your own task.

    A part's score may be NaN for all completions of an example: the part does not concern it. Such
    scores are left out of the part's mean, and count 0 in the total.

    These members are optional:
        num_held_out: the number of distinct evaluation examples; None if they are endless.
        score_batch(examples, texts) -> {part: values}: scores many texts at once. It is trusted: it
            runs without a time limit, and an error in it ends the run.
        score_tokens(batch: TokenBatch) -> {part: [P, G] values}: scores what needs more than the
            text: tokens, log-probs, other models. It is trusted like `score_batch`.
        token_parts: the names of the parts that `score_tokens` gives; all of them if it is missing.
            Then the task needs no `score`.
        success: the part that is 1 for a right completion and 0 for any other. Evaluation reports
            it first. Without it, a completion is right if it equals the example's answer.
        about: what the examples are and how they are scored, said when a run starts.
        explain(example, text) -> str: what is wrong with a completion, in one line, for people who
            look at samples; "" if there is nothing to say. It is asked about few completions.
        judged_by: the software that decides a score; a resumed run warns if it has changed.
        summaries(parts) -> {name: value}: measures of an evaluation that are no mean of a part,
            from the `[n]` values of each part for n completions, where NaN may occur. It is called
            500 times more on bootstrap samples. NaN says that a measure is not defined.
    """

    parts: Mapping[str, float]  # reward part -> default weight

    def train(self, number: int) -> Example:
        """Training example `number`: a pure function of (seed, number), in shuffled order."""

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; training never sees it."""

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every reward part, in [0, 1], for any text whatsoever.

        A true answer scores 1 in each part that concerns the example.
        """


@dataclass(frozen=True)
class Completions:
    """Sampled completions, or the true answers in the supervised warm start."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true up to and including the stop token
    sampler_logp: Tensor | None = None  # [P, G, S] float32, from the sampler's forward
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of the mass kept by top-k, ...

    def __len__(self) -> int:
        return len(self.prompt_len)

    def select(self, prompts: Tensor) -> "Completions":
        """Some of the prompts with all of their completions: a group is never split."""
        return self._each(lambda x: x[prompts])

    @staticmethod
    def join(parts: Sequence["Completions"]) -> "Completions":
        """Concatenate batches of prompts, padded to the longest."""

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
    """Scores of P x G texts by reward part; `total` is the weighted sum of the parts."""

    # float32, or float64 where a value is so large that float32 would merge different rewards
    total: np.ndarray  # [P, G]
    parts: Mapping[str, np.ndarray]  # name -> [P, G]
    failures: Mapping[str, int] = field(default_factory=dict)  # part -> completions it failed on

    @staticmethod
    def join(tables: Sequence["RewardTable"]) -> "RewardTable":
        """Concatenate the tables of several batches of prompts."""
        parts = {name: np.concatenate([t.parts[name] for t in tables]) for name in tables[0].parts}
        failures = {name: sum(t.failures[name] for t in tables) for name in tables[0].failures}
        return RewardTable(np.concatenate([table.total for table in tables]), parts, failures)

    def select(self, rows: np.ndarray) -> "RewardTable":
        """Some of the prompts. Failures of the others stay counted."""
        parts = {name: x[rows] for name, x in self.parts.items()}
        return RewardTable(self.total[rows], parts, self.failures)


PER_COMPLETION = ("advantages", "old_logp", "ref_logp", "loss_mask")


@dataclass(frozen=True)
class RolloutBatch:
    """All that the learner needs for one step."""

    examples: Sequence[Example]  # [P]
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without stop tokens
    rewards: RewardTable | None = None  # None in the supervised warm start
    advantages: Tensor | None = None  # [P, G] float32, one per completion
    old_logp: Tensor | None = None  # [P, G, S] float32, before the first update; None: ratio 1
    ref_logp: Tensor | None = None  # [P, G, S] float32; None: no KL term in the loss
    loss_mask: Tensor | None = None  # [P, G] bool, completions that enter the loss; None: all
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the rollout, to be logged

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
        """Micro-batches of at most `num_prompts` prompts, with all their completions."""
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
        """A copy in which the completions outside `loss_mask` have no tokens left in the loss."""
        if self.loss_mask is None:
            return self
        mask = self.completions.completion_mask & self.loss_mask[..., None]
        masked = replace(self.completions, completion_mask=mask)
        return replace(self, completions=masked, loss_mask=None)

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]` log-probs under the distribution that tokens were drawn from.

        Top-k, top-p and min-p renormalise: the tokens that they keep get more mass.
        """
        logp, log_kept_mass = self.completions.sampler_logp, self.completions.log_kept_mass
        return logp if logp is None or log_kept_mass is None else logp - log_kept_mass

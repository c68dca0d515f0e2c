"""The data that modules pass to each other: frozen dataclasses, each tensor with its shape.

P prompts, of at most Lp tokens; G completions per prompt, of at most S tokens. Prompts are stored
once per group, and padding is always on the right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError as ConfigError

Data = TypeVar("Data", bound="Completions | RolloutBatch")
EXACT = "exact"  # the success of a task that names none: the text equals the true answer
REWARD = "reward"  # the success where nothing says what is right: the weighted sum


@dataclass(frozen=True)
class Example:
    """A prompt and its true answer. In a chat, `prompt` is the question that `messages` ask."""

    prompt: str
    answer: str = ""
    index: int = 0  # place in the task's endless sequence; the key of its random numbers
    kind: str = ""  # kind of question, by which evaluation reports
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)  # role, content
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other keys of a data line
    # schemas for the chat template; None: no dialogue, so a plain prompt is no message of a user's
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)


class Dialogue(str):
    """The text of a completion of several turns: the policy's last one, with all that was said."""

    messages: Sequence[Mapping[str, Any]]  # after the prompt: role, content
    turns: int  # of the policy
    cut: bool  # ended by a limit, although the environment had answered
    failed: bool  # the environment did
    rewards: Mapping[str, float]  # of its environment, by name


def each_tensor(data: Data, change: Callable[[Tensor], Tensor]) -> Data:
    """A copy of a dataclass whose tensors, also those of its completions, are changed."""
    changed: dict[str, Any] = {}
    for name, x in vars(data).items():
        if isinstance(x, Tensor):
            changed[name] = change(x)
        elif isinstance(x, Completions):
            changed[name] = each_tensor(x, change)
    return replace(data, **changed)


@dataclass(frozen=True)
class Completions:
    """Sampled completions, or the true answers in supervised fine-tuning.

    In a dialogue, a completion is all that follows the prompt: the turns of the policy, and between
    them what the environment said, whose tokens are outside the mask. The last token is sampled.
    """

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true for tokens that the policy sampled
    sampler_logp: Tensor | None = None  # [P, G, S] float32, 0 where masked, see RolloutBatch
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of the mass kept by top-k, ...

    def __post_init__(self) -> None:
        mask, ids = self.completion_mask, self.completion_ids
        if mask.dtype != torch.bool or mask.shape != ids.shape:
            said = f"got {mask.dtype} {list(mask.shape)}"
            raise ValueError(f"completion_mask must be bool {list(ids.shape)}, {said}")

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def completion_len(self) -> Tensor:
        """`[P, G]` int64, tokens up to the last sampled one; others in between are counted too."""
        columns = torch.arange(1, self.completion_mask.shape[-1] + 1, device=self.prompt_len.device)
        return (self.completion_mask * columns).amax(-1)

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]` log-probs under the distribution that tokens were drawn from."""
        if self.sampler_logp is None or self.log_kept_mass is None:
            return self.sampler_logp
        return self.sampler_logp - self.log_kept_mass

    def select(self, prompts: Tensor) -> "Completions":
        """Some of the prompts with all of their completions: a group is never split."""
        return each_tensor(self, lambda x: x[prompts])

    def to(self, device: torch.device | str) -> "Completions":
        return each_tensor(self, lambda x: x.to(device))

    @staticmethod
    def join(parts: Sequence["Completions"]) -> "Completions":
        """Concatenate batches of prompts, padded to the longest."""
        joined: dict[str, Any] = {}
        for name in vars(parts[0]):
            tensors = [getattr(part, name) for part in parts]
            if tensors[0] is None:
                continue
            longest = max(x.shape[-1] for x in tensors)
            if tensors[0].dim() > 1:
                tensors = [torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in tensors]
            joined[name] = torch.cat(tensors)
        return Completions(**joined)


@dataclass(frozen=True)
class RewardTable:
    """Scores of P x G texts by reward function; `total` is the weighted sum."""

    total: np.ndarray  # [P, G] float64
    parts: Mapping[str, np.ndarray]  # name -> [P, G] float64, NaN where a part does not apply
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


@dataclass(frozen=True)
class RolloutBatch:
    """All that the learner needs for one step.

    Log-probs are of the sampled tokens, in nats, of logits divided by --temperature. There are five
    kinds:
    sampler_logp: the policy's, by the sampler's forward; what tokens are drawn from before top-k,
        top-p and min-p.
    behavior_logp: the same, renormalised over the tokens that these keep.
    old_logp: the policy's before the step's first update, by the trainer's forward.
    ref_logp: the frozen reference's.
    teacher_logp: the teacher's, after the prompt that it reads.
    """

    examples: Sequence[Example]  # [P]
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without stop tokens
    rewards: RewardTable | None = None  # None in supervised fine-tuning
    advantages: Tensor | None = None  # [P, G] float32, one per completion
    old_logp: Tensor | None = None  # [P, G, S] float32; None: that of the policy, a ratio of 1
    ref_logp: Tensor | None = None  # [P, G, S] float32; None: no KL term in the loss
    teacher_logp: Tensor | None = None  # [P, G, S] float32; None: no advantages of tokens
    loss_mask: Tensor | None = None  # [P, G] bool, completions that enter the loss; None: all
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the sampling, to be logged

    def __len__(self) -> int:
        return len(self.examples)

    @staticmethod
    def join(batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """Concatenate what `roll_out` gives: examples, completions, texts and rewards."""
        return RolloutBatch(
            [example for batch in batches for example in batch.examples],
            Completions.join([batch.completions for batch in batches]),
            [group for batch in batches for group in batch.texts],
            RewardTable.join([batch.rewards for batch in batches if batch.rewards]),
        )

    def select(self, prompts: Sequence[int] | Tensor) -> "RolloutBatch":
        """Some of the prompts with all of their completions."""
        rows = torch.as_tensor(prompts)
        return replace(
            each_tensor(self, lambda x: x[rows]),
            examples=[self.examples[p] for p in rows],
            texts=[self.texts[p] for p in rows],
            rewards=self.rewards and self.rewards.select(rows.numpy()),
        )

    def split(self, num_prompts: int) -> list["RolloutBatch"]:
        """Micro-batches of at most `num_prompts` prompts, with all their completions."""
        return [self.select(rows) for rows in torch.arange(len(self)).split(num_prompts)]

    def to(self, device: torch.device | str) -> "RolloutBatch":
        return each_tensor(self, lambda x: x.to(device))

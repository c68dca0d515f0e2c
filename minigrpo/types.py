"""The data that modules pass to each other: frozen dataclasses, each tensor with its shape.

P prompts, of at most Lp tokens; G completions per prompt, of at most S tokens. Prompts are stored
once per group, and padding is always on the right.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError as ConfigError

Warn = Callable[[str], object]  # says something to the user

EXACT = "exact"  # the success of a task that names none: the text equals the true answer
REWARD = "reward"  # the success where nothing says what is right: the weighted sum


@dataclass(frozen=True)
class Example:
    """A prompt and its true answer. In a chat, `prompt` is the question that `messages` ask."""

    prompt: str
    answer: str = ""
    index: int = 0  # its number in the task; the key of its random numbers
    kind: str = ""  # kind of question, by which evaluation reports
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)  # role, content
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other keys of a data line
    # schemas for the chat template; None: no dialogue, and a plain prompt is not made a message
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)


class Dialogue(str):
    """The text of a completion of several turns: the policy's last one, with all that was said."""

    messages: Sequence[Mapping[str, Any]]  # after the prompt: role, content
    turns: int  # of the policy
    cut: bool  # ended by a limit, although the environment had answered
    failed: bool  # its environment raised an error or took too long
    rewards: Mapping[str, float]  # of its environment, by name


class Rows(Sized):
    """A dataclass with a row for each prompt in its tensors, arrays, lists and other `Rows`.

    A group is never split: all completions of a prompt are in its row. The first field has rows.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def each(self, change: Callable[..., Any], *others: Self) -> Self:
        """A copy, in which `change` was applied to all that has rows, and to counts."""

        def changed(x: Any, *same: Any) -> Any:
            if isinstance(x, Rows):
                return x.each(change, *same)
            if isinstance(x, dict):
                return {name: changed(x[name], *(y[name] for y in same)) for name in x}
            return None if x is None else change(x, *same)

        return type(self)(**changed(vars(self), *map(vars, others)))

    def to(self, device: torch.device | str) -> Self:
        return self.each(lambda x: x.to(device) if isinstance(x, Tensor) else x)

    def select(self, prompts: Sequence[int] | Tensor) -> Self:
        """Some of the prompts; counts stay as they are."""
        rows = np.asarray(prompts, dtype=np.int64)

        def selected(x: Any) -> Any:
            if isinstance(x, Tensor | np.ndarray):
                return x[rows]
            return [x[row] for row in rows] if isinstance(x, list) else x

        return self.each(selected)

    def split(self, num_prompts: int) -> list[Self]:
        """Micro-batches of at most `num_prompts` prompts."""
        return [self.select(rows) for rows in torch.arange(len(self)).split(num_prompts)]

    def join(self, other: Self) -> Self:
        """These prompts and then others, padded to the longest; counts are added."""

        def joined(a: Any, b: Any) -> Any:
            if isinstance(a, np.ndarray):
                return np.concatenate([a, b])
            if not isinstance(a, Tensor):
                return a + b
            longest = max(a.shape[-1], b.shape[-1])
            if a.dim() > 1:
                a, b = (torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in (a, b))
            return torch.cat([a, b])

        return self.each(joined, other)


@dataclass(frozen=True)
class Completions(Rows):
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

    @property
    def completion_len(self) -> Tensor:
        """`[P, G]` int64, tokens up to the last sampled one; others in between are counted too."""
        columns = torch.arange(1, self.completion_mask.shape[-1] + 1, device=self.prompt_len.device)
        return (self.completion_mask * columns).amax(-1)

    def ended(self, stops: Collection[int]) -> Tensor:
        """`[P, G]` bool: the completion ends with a stop token; otherwise it was cut off."""
        last = (self.completion_len - 1).clamp(min=0)
        ends = torch.tensor(sorted(stops), dtype=torch.int64)
        return torch.isin(self.completion_ids.gather(-1, last[..., None])[..., 0], ends)

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]` log-probs under the distribution that tokens were drawn from."""
        if self.sampler_logp is None or self.log_kept_mass is None:
            return self.sampler_logp
        return self.sampler_logp - self.log_kept_mass


@dataclass(frozen=True)
class RewardTable(Rows):
    """Scores of P x G texts by reward function; `total` is the weighted sum."""

    total: np.ndarray  # [P, G] float64
    parts: Mapping[str, np.ndarray]  # name -> [P, G] float64, NaN where a part does not apply
    failures: Mapping[str, int] = field(default_factory=dict)  # part -> completions it failed on

    @property
    def zero_variance(self) -> np.ndarray:
        """`[P]` bool: all completions of the prompt have equal rewards, which teach nothing."""
        return self.total.max(1) == self.total.min(1)


@dataclass(frozen=True)
class RolloutBatch(Rows):
    """A step's batch. The learner itself fills in `old_logp` and `teacher_logp`.

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

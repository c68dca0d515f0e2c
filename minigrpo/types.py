"""The data that modules pass to each other: frozen dataclasses, each tensor with its shape.

P prompts, of at most Lp tokens, once per group; G completions per prompt, of at most S tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import ConfigError as ConfigError

Warn = Callable[[str], object]  # says something to the user

EXACT = "exact"  # the success of a task that names none: the text equals the true answer
REWARD = "reward"  # the success where nothing says what is right: the weighted sum
# Weighted sums of rewards that are equal, such as 0.1 + 0.2 and 0.3, differ by the rounding of
# their terms: by at most this many times the machine epsilon, relative to them.
ROUNDINGS = 8


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
    # the row that it was read from, such as "a.jsonl, line 3"
    place: str = field(default="", compare=False, repr=False)

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.place or f"example {self.index} ({self.prompt[:60]!r}...)"


class Dialogue(str):
    """The text of a completion of several turns: the policy's last one, with all that was said."""

    messages: Sequence[Mapping[str, Any]] = ()  # after the prompt: role, content
    turns: int = 1  # of the policy
    failed_calls: Sequence[bool] = ()  # whether each call of a tool has failed
    cut: bool = False  # ended by a limit, although the environment had answered
    error: str = ""  # what its environment raised, or that it took too long
    rewards: Mapping[str, float | None] = {}  # of its environment, by name; NaN after an error

    def __new__(cls, text: str, **fields: Any) -> "Dialogue":
        dialogue = super().__new__(cls, text)
        vars(dialogue).update(fields)
        return dialogue


class PerPrompt(Sized):
    """A dataclass with a row for each prompt: in its tensors, arrays, lists, and in those inside.

    A group is never split: all completions of a prompt are in its row. The first field has rows.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def to(self, device: torch.device | str) -> Self:
        moved = {
            name: value.to(device) if isinstance(value, Tensor | PerPrompt) else value
            for name, value in vars(self).items()
        }
        return type(self)(**moved)

    def select(self, rows: Sequence[int] | np.ndarray) -> Self:
        """Some of the prompts, by their numbers, in any order."""
        return type(self)(**{name: _selected(value, rows) for name, value in vars(self).items()})

    def split(self, num_prompts: int) -> list[Self]:
        """Micro-batches of at most `num_prompts` prompts."""
        rows = np.arange(len(self))
        starts = range(0, len(self), num_prompts)
        return [self.select(rows[start : start + num_prompts]) for start in starts]

    def join(self, other: Self) -> Self:
        """These prompts and then others, padded to the longest."""
        theirs = vars(other)
        return type(self)(**{name: _joined(x, theirs[name]) for name, x in vars(self).items()})


def _selected(value: Any, rows: Sequence[int] | np.ndarray) -> Any:
    if isinstance(value, PerPrompt):
        return value.select(rows)
    if isinstance(value, Tensor | np.ndarray):
        return value[rows]
    if isinstance(value, dict):
        return {name: _selected(x, rows) for name, x in value.items()}
    return [value[row] for row in rows] if isinstance(value, list) else value


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, PerPrompt):
        return first.join(second)
    if isinstance(first, dict):
        return {name: _joined(x, second[name]) for name, x in first.items()}
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    if isinstance(first, Tensor):
        if first.dim() > 1:
            width = max(first.shape[-1], second.shape[-1])
            first, second = (pad(x, (0, width - x.shape[-1])) for x in (first, second))
        return torch.cat([first, second])
    return None if first is None else first + second


@dataclass(frozen=True)
class Completions(PerPrompt):
    """Sampled completions, or the true answers in supervised fine-tuning.

    In a dialogue, all that follows the prompt, up to the last turn's end, is one completion.
    """

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true for tokens that the policy sampled
    sampler_logp: Tensor | None = None  # [P, G, S] float32, 0 where masked, see RolloutBatch
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of the mass kept by top-k, ...
    stopped: Tensor | None = None  # [P, G] bool, the completion ends with a stop text

    @property
    def completion_len(self) -> Tensor:
        """`[P, G]` int64, tokens up to the last sampled one; others in between are counted too."""
        columns = torch.arange(1, self.completion_mask.shape[-1] + 1, device=self.prompt_len.device)
        return (self.completion_mask * columns).amax(-1)

    def ended(self, stops: Collection[int]) -> Tensor:
        """`[P, G]` bool: the completion ends with a stop token or text, and was not cut off."""
        last_column = (self.completion_len - 1).clamp(min=0)[..., None]
        last_token = self.completion_ids.gather(-1, last_column)[..., 0]
        ended = torch.isin(last_token, torch.tensor(sorted(stops), dtype=torch.int64))
        return ended if self.stopped is None else ended | self.stopped

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]` log-probs under the distribution that tokens were drawn from."""
        if self.sampler_logp is None or self.log_kept_mass is None:
            return self.sampler_logp
        return self.sampler_logp - self.log_kept_mass


@dataclass(frozen=True)
class RewardTable(PerPrompt):
    """Scores of P x G texts by reward function; `total` is the weighted sum."""

    total: np.ndarray  # [P, G] float64, NaN where a paid reward failed throughout the batch
    parts: Mapping[str, np.ndarray]  # name -> [P, G] float64, NaN where a part does not apply
    # name -> [P, G] bool: the reward failed there, and the part has the worst value of the group
    failed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def zero_variance(self) -> np.ndarray:
        """`[P]` bool: all completions of the prompt have equal rewards, which teach nothing."""
        known = np.nan_to_num(self.total)
        rounding = ROUNDINGS * np.finfo(known.dtype).eps
        return np.isclose(known.max(1), known.min(1), rtol=rounding, atol=0)


@dataclass(frozen=True)
class RolloutBatch(PerPrompt):
    """A step's batch. The learner itself fills in `old_logp`.

    Log-probs are of the sampled tokens, in nats, of logits divided by --temperature:
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

    def ended(self, stops: Collection[int]) -> Tensor:
        """`[P, G]` bool: the completion ended by itself. A dialogue also ends at a limit.

        Then its last turn is whole, but the environment's answer had no room or no turn after it.
        """
        cut = [[isinstance(text, Dialogue) and text.cut for text in group] for group in self.texts]
        return self.completions.ended(stops) & ~torch.tensor(cut)

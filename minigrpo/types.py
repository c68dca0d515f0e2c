"""The data that modules pass to each other: frozen dataclasses, each tensor with its shape.

P prompts, of at most Lp tokens, once per group; G completions per prompt, of at most S tokens.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import ConfigError as ConfigError
from .statistics import PartlyKnown

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
    index: int = 0  # differs within a split; the key of its random numbers
    kind: str = ""  # kind of question, by which evaluation reports
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)  # role, content
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other keys of a data line
    # schemas of tools for the chat template; None without tools or an environment
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)
    # the row that it was read from, such as "a.jsonl, line 3"
    place: str = field(default="", compare=False, repr=False)

    @property
    def label(self) -> str:
        return self.place or f"example {self.index} ({self.prompt[:60]!r}...)"


class Completion(str):
    """A completion's text, which is the last turn of a dialogue, with all that was said."""

    messages: Sequence[Mapping[str, Any]]  # what follows the prompt, each with role and content
    is_dialogue: bool = False  # tools or an environment could answer
    turns: int = 1  # turns of the policy
    failed_calls: Sequence[bool] | None = None  # whether each call failed; None without tools
    cut: bool = False  # whether a limit ended the dialogue
    error: str | None = None  # what its environment raised, or that it took too long
    # rewards by environment: None where it does not reward the row, NaN after an error
    rewards: Mapping[str, float | None] = {}

    def __new__(cls, text: str, **fields: Any) -> "Completion":
        completion = super().__new__(cls, text)
        completion.messages = [{"role": "assistant", "content": text}]
        vars(completion).update(fields)
        return completion


class PerPrompt(Sized):
    """A dataclass with a row for each prompt: in its tensors, arrays, lists, and in those inside.

    The row has all completions of the prompt. The first field has rows.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def to(self, device: torch.device | str) -> Self:
        return _of_fields(lambda x: x.to(device) if isinstance(x, Tensor) else x, self)

    def select(self, rows: Sequence[int] | np.ndarray) -> Self:
        """The rows of these numbers, in any order; numbers `[P, G]` make `[P, G]` of `[n]`."""
        return _of_fields(partial(_select_rows, rows), self)

    def split(self, num_prompts: int) -> list[Self]:
        """Micro-batches of at most `num_prompts` prompts."""
        rows = np.arange(len(self))
        starts = range(0, len(self), num_prompts)
        return [self.select(rows[start : start + num_prompts]) for start in starts]

    @classmethod
    def join(cls, batches: Sequence[Self]) -> Self:
        """The prompts of several batches, padded to the longest."""
        return _of_fields(_join_rows, *batches)


def _of_fields(function: Callable[..., Any], *values: Any) -> Any:
    """What a function makes of each field, at any depth, of one batch or of several."""
    first = values[0]
    if isinstance(first, PerPrompt):
        return type(first)(**_of_fields(function, *map(vars, values)))
    if isinstance(first, dict):
        return {name: _of_fields(function, *(x[name] for x in values)) for name in first}
    return function(*values)


def _select_rows(rows: Sequence[int] | np.ndarray, value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[rows]
    if isinstance(value, list):
        return [value[row] for row in rows]
    return value  # a number belongs to the whole batch


def _join_rows(*values: Any) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Tensor):
        if first.dim() > 1:
            width = max(value.shape[-1] for value in values)
            values = tuple(pad(value, (0, width - value.shape[-1])) for value in values)
        return torch.cat(values)
    if isinstance(first, list):
        return [row for value in values for row in value]
    if isinstance(first, str):  # of the whole batch
        return first
    return None if all(value is None for value in values) else sum(values)


@dataclass(frozen=True)
class Completions(PerPrompt):
    """Sampled completions, or true answers. All turns and answers of a dialogue are one."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true for tokens that the policy sampled
    sampler_logp: Tensor | None = None  # [P, G, S] float32, 0 where masked, before top-k, ..
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of the mass that top-k, ... keep
    # [P, G] bool, it ends with a stop token or text, and was not cut off; None for true answers
    ended: Tensor | None = None

    @property
    def completion_len(self) -> Tensor:
        """`[P, G]` int64, tokens up to the last sampled one; others in between are counted too."""
        columns = torch.arange(1, self.completion_mask.shape[-1] + 1, device=self.prompt_len.device)
        return (self.completion_mask * columns).amax(-1)

    @property
    def truncated_sampler_logp(self) -> Tensor | None:
        """`[P, G, S]`, of the distribution that the tokens were drawn from, after top-k, .."""
        if self.sampler_logp is None or self.log_kept_mass is None:
            return self.sampler_logp
        return self.sampler_logp - self.log_kept_mass


class AddedRow(NamedTuple):
    """The attention of the tokens that a completion adds to those before it, by places."""

    queries: np.ndarray  # those tokens
    keys: np.ndarray  # the prompt and all tokens of the completion that are run
    prompt: int  # the number of the prompt's causal row


@dataclass(frozen=True)
class PackedPrompt:
    """A prompt and its completions, packed by model/packing.py. A place is one of its n tokens."""

    ids: np.ndarray  # [n] the packed tokens
    positions: np.ndarray  # [n] the position of each in its own text
    parents: np.ndarray  # [n] the place before each in its text; -1 for the first
    sources: np.ndarray  # [m] places whose next token is predicted
    targets: np.ndarray  # [m] that next token
    index: np.ndarray  # [G, S] or [P, G, S] into the m predictions; 0 where no token was sampled
    mask: np.ndarray  # the same shape, bool: where a token was sampled
    causal_rows: Sequence[np.ndarray]  # places that attend to all before them in their row
    added_rows: Sequence[AddedRow]


@dataclass(frozen=True)
class Scores(PartlyKnown, PerPrompt):
    """The scores that one reward gives to texts: `[n]` in a call, `[P, G]` in a table.

    A failed call has no value; in a table, it has its group's worst: see `rewards.scorer.settled`.
    """

    failed: np.ndarray  # bool, the call raised, took too long or gave a number that is not finite

    @property
    def applies(self) -> np.ndarray:
        """Whether the reward concerns the text, bool; a user's function says None where not."""
        return self.known | self.failed

    def failing(self, broken: np.ndarray) -> "Scores":
        """The same scores, but failed for texts of `broken`, bool, that the reward concerns."""
        failed = self.failed | (broken & self.applies)
        known = self.known & ~failed
        return Scores(np.where(known, self.values, 0.0), known, failed)


def are_equal(rewards: Tensor) -> Tensor:
    """`[P]` bool: the rewards of a group, `[P, G]`, are equal up to the rounding of their sums."""
    rounding = ROUNDINGS * torch.finfo(rewards.dtype).eps
    return torch.isclose(rewards.amax(-1), rewards.amin(-1), rtol=rounding, atol=0)


@dataclass(frozen=True)
class RewardTable(PerPrompt):
    total: np.ndarray  # [P, G] float64, the weighted sum
    # [P, G] bool; false where a reward of the sum failed and there is nothing to compare it with:
    # the total is then the worst of its group
    total_known: np.ndarray
    scores: Mapping[str, Scores]  # by reward, [P, G] each

    @property
    def zero_variance(self) -> np.ndarray:
        """`[P]` bool: all completions of the prompt have equal rewards, which teach nothing."""
        return are_equal(torch.from_numpy(self.total)).numpy()


@dataclass(frozen=True)
class RolloutBatch(PerPrompt):
    """A step's batch. Log-probs are of the sampled tokens, in nats, of logits / temperature.

    The glossary of CONTRIBUTING.md says who computes each of them.
    """

    examples: Sequence[Example]  # [P]
    completions: Completions
    texts: Sequence[Sequence[Completion]]  # [P][G], without stop tokens
    rewards: RewardTable | None = None  # None in supervised fine-tuning
    advantages: Tensor | None = None  # [P, G] float32, one per completion
    old_logp: Tensor | None = None  # [P, G, S] float32, or None for a ratio of 1
    reference_logp: Tensor | None = None  # [P, G, S] float32, or None for a loss without a KL
    teacher_logp: Tensor | None = None  # [P, G, S] float32, or None without a teacher
    loss_mask: Tensor | None = None  # [P, G] bool, completions in the loss, or None for all
    packed: Sequence[PackedPrompt] | None = None  # [P], or None before the update
    metrics: Mapping[str, float] = field(default_factory=dict)  # `join` adds them up

    @property
    def ended(self) -> Tensor:
        """`[P, G]` bool: the completion ended by itself, and a dialogue not at a limit either."""
        assert self.completions.ended is not None
        cut = [[text.cut for text in group] for group in self.texts]
        return self.completions.ended & ~torch.tensor(cut)

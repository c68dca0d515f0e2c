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

Data = TypeVar("Data", bound="Completions | RolloutBatch")
EXACT = "exact"  # the success of a task that names none: the text equals the true answer


class ConfigError(ValueError):
    """Bad input of the user's: a setting, a file, a function. The commands print it as one line."""


@dataclass(frozen=True)
class Example:
    """A prompt and its true answer. In a chat, `prompt` is the question that `messages` ask."""

    prompt: str
    answer: str = ""
    index: int = 0  # place in the task's endless sequence; the key of its random numbers
    kind: str = ""  # kind of question, by which evaluation reports
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)  # role, content
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other keys of a data line


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
    """Sampled completions, or the true answers in supervised fine-tuning."""

    prompt_ids: Tensor  # [P, Lp] int64, right-padded, one row per prompt
    prompt_len: Tensor  # [P] int64
    completion_ids: Tensor  # [P, G, S] int64, right-padded; column s is the s-th new token
    completion_mask: Tensor  # [P, G, S] bool, true up to and including the stop token
    sampler_logp: Tensor | None = None  # [P, G, S] float32, from the sampler's forward
    log_kept_mass: Tensor | None = None  # [P, G, S] float32, log of the mass kept by top-k, ...

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def behavior_logp(self) -> Tensor | None:
        """`[P, G, S]` log-probs under the distribution that tokens were drawn from.

        Top-k, top-p and min-p renormalise: the tokens that they keep get more mass.
        """
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
class TokenBatch:
    """What a reward function of tokens sees: a copy, which it may change."""

    examples: Sequence[Example]  # [P]
    texts: Sequence[Sequence[str]]  # [P][G]
    completions: Completions  # sampler_logp [P, G, S] has the policy's log-probs
    temperature: float  # of the samples: sampler_logp is of logits / temperature
    decode: Callable[[Sequence[int]], str]  # of the policy's tokenizer
    model: Callable[[str], Any]  # a frozen model by name: see model/frozen_model.py


class Task:
    """An endless supply of prompts, and scores for completions. Subclass it for your own task.

    A task is made with the arguments that its `__init__` names, out of `seed`, `data`, `eval_data`
    (lists of paths), `chat` (whether --system makes prompts messages) and --task-args.
    A value of a part may be NaN for all completions of an example: the part does not concern it.
    """

    parts: Mapping[str, float] = {}  # reward function -> weight in the total
    success: str = EXACT  # the part that is 1 for a right completion; EXACT needs no part
    num_held_out: int | None = None  # distinct evaluation examples; None: endless
    about: str = ""  # what the examples are and how they are scored, printed when a run starts
    token_parts: Sequence[str] = ()  # the parts that `score_tokens` gives
    speculate: bool = False  # whether completions resemble the answer: propose its tokens
    # 64-bit hashes of the training and the held-out questions; None: questions are made by a seed
    questions: tuple[np.ndarray, np.ndarray] | None = None

    def train(self, number: int) -> Example:
        """Training example `number`: a pure function of (seed, number), in shuffled order."""
        raise NotImplementedError

    def held_out(self, number: int) -> Example:
        """Evaluation example `number`; training never sees it."""
        raise NotImplementedError

    def longest(self, number: int) -> Sequence[Example]:
        """The examples with the most characters, of a task that knows all of its examples.

        A run checks before it starts that they fit the model.
        """
        return ()

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part's value for any text whatsoever; a true answer scores highest."""
        raise NotImplementedError

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
        """Measures of an evaluation that are no mean of a part, from the `[n]` values of each."""
        return {}

    def explain(self, example: Example, text: str) -> str:
        """What is wrong with a completion, in one line, for people who look at samples."""
        return ""


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
    """All that the learner needs for one step."""

    examples: Sequence[Example]  # [P]
    completions: Completions
    texts: Sequence[Sequence[str]]  # [P][G], the completions as text, without stop tokens
    rewards: RewardTable | None = None  # None in supervised fine-tuning
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
            each_tensor(self, lambda x: x[rows]),
            examples=[self.examples[p] for p in prompts],
            texts=[self.texts[p] for p in prompts],
            rewards=None,
        )

    def split(self, num_prompts: int) -> list["RolloutBatch"]:
        """Micro-batches of at most `num_prompts` prompts, with all their completions."""
        starts = range(0, len(self), num_prompts)
        return [self.select(range(a, min(a + num_prompts, len(self)))) for a in starts]

    def to(self, device: torch.device | str) -> "RolloutBatch":
        return each_tensor(self, lambda x: x.to(device))

    def with_loss_mask_applied(self) -> "RolloutBatch":
        """A copy in which the completions outside `loss_mask` have no tokens left in the loss."""
        if self.loss_mask is None:
            return self
        mask = self.completions.completion_mask & self.loss_mask[..., None]
        masked = replace(self.completions, completion_mask=mask)
        return replace(self, completions=masked, loss_mask=None)


@dataclass(frozen=True)
class Graded:
    """K completions of each of n evaluation examples, and their scores."""

    examples: Sequence[Example]  # [n]
    texts: Sequence[Sequence[str]]  # [n][K]
    rewards: RewardTable  # [n, K]
    success: str  # the part that says which are right; EXACT, if it is no part: equal to the answer

    @property
    def right(self) -> np.ndarray:
        """`[n, K]`: 1 for a right completion, else 0; NaN where that concerns no example."""
        if (scores := self.rewards.parts.get(self.success)) is not None:
            return np.where(np.isnan(scores), np.nan, scores == 1)
        pairs = zip(self.examples, self.texts, strict=True)
        same = [[text == example.answer for text in group] for example, group in pairs]
        return np.array(same, dtype=float)

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """The `[n, K]` values of all measures that are means; the success comes first."""
        parts = {name: x for name, x in self.rewards.parts.items() if name != self.success}
        return {self.success: self.right, **parts, "reward": self.rewards.total}

"""Where the batches of a run come from: sampled from the policy and scored (OnPolicy), or simply true (Gold).

The trainer cannot tell the two apart but by the loss that it was given. Examples are made ahead of need by a thread, so
that a step never waits for self-play.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tiktoken
import torch
from torch import Tensor

from .config import Config, ConfigError
from .losses import KL_IN_REWARD, LOSSES, advantages
from .metrics import PhaseTimer
from .model import GPT
from .randomness import uniforms
from .reference import Reference
from .rewards import RewardScorer
from .sampling import generate
from .types import Completions, Example, RolloutBatch

STEPS_AHEAD = 8  # how many steps' examples are made before they are needed


class Source(Protocol):
    def batch(self, step: int) -> RolloutBatch:
        """The batch of a step, on the host; a pure function of (config, step, weights)."""


class Ahead:
    """Examples of a step, made in the background for the steps to come."""

    def __init__(self, example: Callable[[int], Example], per_step: int, first_step: int, last_step: int) -> None:
        self.example, self.per_step, self.last_step = example, per_step, last_step
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="examples")
        self.futures: dict[int, Future[list[Example]]] = {}
        self._submit(first_step)

    def take(self, step: int) -> list[Example]:
        self._submit(step)
        return self.futures.pop(step).result()

    def _submit(self, step: int) -> None:
        for ahead in range(step, min(step + STEPS_AHEAD, self.last_step)):
            if ahead not in self.futures:
                self.futures[ahead] = self.pool.submit(self._make, ahead)

    def _make(self, step: int) -> list[Example]:
        return [self.example(step * self.per_step + i) for i in range(self.per_step)]


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad token lists: `[R, L]` int64 and their lengths `[R]`."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids), torch.from_numpy(lengths)


def encode_prompts(tokenizer: tiktoken.Encoding, examples: Sequence[Example], room: int) -> tuple[Tensor, Tensor]:
    """Prompts as right-padded ids `[P, Lp]` and lengths `[P]`. Raises ConfigError for one longer than `room` tokens."""
    ids, lengths = pad([tokenizer.encode_ordinary(example.prompt) for example in examples])
    if int(lengths.max()) > room:
        worst = examples[int(lengths.argmax())].prompt
        raise ConfigError(
            f"a prompt of {int(lengths.max())} tokens leaves no room for --max-new-tokens in the model's --context: at most "
            f"{room} are allowed ({worst[:60]!r}...)"
        )
    return ids, lengths


def decode(tokenizer: tiktoken.Encoding, completions: Completions) -> list[list[str]]:
    """The texts of completions, without end of text: `[P][G]`."""
    ids, lengths = completions.completion_ids.numpy(), completions.completion_mask.sum(-1).numpy()
    eos = tokenizer.eot_token
    return [
        [tokenizer.decode([t for t in row[:n].tolist() if t != eos]) for row, n in zip(group, ns, strict=True)]
        for group, ns in zip(ids, lengths, strict=True)
    ]


def join(parts: Sequence[Completions]) -> Completions:
    """Completions of consecutive prompts as one, padded to the longest; the prompts' width is the same in all."""
    longest = max(part.completion_ids.shape[2] for part in parts)

    def along_prompts(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        if name.startswith("prompt"):
            return torch.cat(tensors)
        return torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[2])) for x in tensors])

    return Completions(**{name: along_prompts(name) for name in vars(parts[0])})


def encode_answers(tokenizer: tiktoken.Encoding, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """True completions, end of text included, as right-padded ids `[P, L]` and lengths `[P]`."""
    return pad([[*tokenizer.encode_ordinary(example.answer), tokenizer.eot_token] for example in examples])


@dataclass(frozen=True)
class Sampler:
    """Completions of examples by the model as it is."""

    config: Config
    model: GPT
    tokenizer: tiktoken.Encoding
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        temperature: float = 1.0,
        batch_size: int = 0,
    ) -> Completions:
        """`num_samples` completions of each example, on the host; greedy without uniform numbers `u [P, G, S]`.

        `batch_size` prompts are decoded together (0: all), which changes nothing but memory and time.
        """
        config, device = self.config, self.model.device
        prompt_ids, prompt_len = encode_prompts(self.tokenizer, examples, self.model.shape.context - config.max_new_tokens)
        drafts = encode_answers(self.tokenizer, examples)[0] if config.draft_answers else None
        parts = []
        for a in range(0, len(examples), batch_size or len(examples)):
            cut = slice(a, a + (batch_size or len(examples)))
            with self.autocast():
                part = generate(
                    self.model,
                    prompt_ids[cut].to(device),
                    prompt_len[cut].to(device),
                    eos=self.tokenizer.eot_token,
                    max_new_tokens=config.max_new_tokens,
                    num_samples=num_samples,
                    u=None if u is None else torch.from_numpy(u[cut]).to(device),
                    temperature=temperature,
                    kv_cache=config.kv_cache,
                    drafts=None if drafts is None else drafts[cut].to(device),
                    draft_window=config.draft_window,
                )
            parts.append(part.to("cpu"))
        return join(parts)


def describe(batch: RolloutBatch, eos: int) -> dict[str, float]:
    """Metrics of a batch as it was sampled, under TRL's names."""
    mask = batch.completions.completion_mask
    lengths = mask.sum(-1)
    values = {"completions/mean_length": lengths.float().mean().item()}
    # what the update would have run with every prompt repeated; tokens/run is what it did run
    inputs = batch.completions.prompt_len.sum() * lengths.shape[1] + (lengths - 1).clamp(min=0).sum()
    values["tokens/repeated"] = float(inputs)
    if batch.rewards is None:
        return values
    last = batch.completions.completion_ids.gather(-1, (lengths[..., None] - 1).clamp(min=0))
    total = batch.rewards.total
    return {
        "reward": float(total.mean()),
        "reward_std": float(total.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float((total.max(1) == total.min(1)).mean()),
        **{f"rewards/{name}/mean": float(scores.mean()) for name, scores in batch.rewards.parts.items()},
        "completions/clipped_ratio": float((last != eos).float().mean()),
        **values,
    }


class Gold:
    """The true completions, one a prompt: the supervised warm start."""

    def __init__(self, examples: Ahead, tokenizer: tiktoken.Encoding, timer: PhaseTimer, context: int) -> None:
        self.examples, self.tokenizer, self.timer, self.context = examples, tokenizer, timer, context

    def batch(self, step: int) -> RolloutBatch:
        with self.timer.phase("data"):
            examples = self.examples.take(step)
            ids, lengths = encode_answers(self.tokenizer, examples)
            prompt_ids, prompt_len = encode_prompts(self.tokenizer, examples, self.context - ids.shape[1])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        completions = Completions(prompt_ids, prompt_len, ids[:, None], mask[:, None])
        return RolloutBatch(examples, completions, [[example.answer] for example in examples])


class OnPolicy:
    """Completions sampled from the model as it is, scored, and turned into advantages."""

    def __init__(
        self, config: Config, examples: Ahead, sampler: Sampler, scorer: RewardScorer, reference: Reference, timer: PhaseTimer
    ) -> None:
        self.config, self.examples, self.sampler = config, examples, sampler
        self.scorer, self.reference, self.timer = scorer, reference, timer

    def batch(self, step: int) -> RolloutBatch:
        config, spec = self.config, LOSSES[self.config.loss]
        with self.timer.phase("data"):
            examples = self.examples.take(step)
        with self.timer.phase("rollout"):
            completions = self.sample(examples, step)
            texts = decode(self.sampler.tokenizer, completions)
        with self.timer.phase("reward"):
            rewards = self.scorer.score(examples, texts)
        with self.timer.phase("reference"):
            ref_logp = self.reference.logp(completions)
        total = torch.from_numpy(rewards.total)
        if config.kl == KL_IN_REWARD and ref_logp is not None and completions.sampler_logp is not None:
            total = total - config.kl_coef * (completions.sampler_logp - ref_logp).sum(-1)
        estimator = spec.advantage if config.advantage == "auto" else config.advantage
        scale = spec.scale if config.scale == "auto" else config.scale
        return RolloutBatch(
            examples=examples,
            completions=completions,
            texts=texts,
            rewards=rewards,
            advantages=advantages(total, estimator=estimator, scale=scale),
            ref_logp=ref_logp,
        )

    def sample(self, examples: Sequence[Example], step: int) -> Completions:
        """Completions of a step's examples; each depends on nothing but its prompt, seed, step and the weights."""
        config = self.config
        rows = np.array([example.index for example in examples])
        return self.sampler.complete(
            examples,
            num_samples=config.group_size,
            u=uniforms(config.seed, "sample", step, rows, config.group_size, config.max_new_tokens),
            temperature=config.temperature,
            batch_size=config.rollout_batch_size,
        )

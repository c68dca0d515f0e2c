"""Where the batches of a run come from: sampled from the policy and scored (RolloutBatches), or simply
true (SupervisedBatches).

The trainer cannot tell the two apart but by the loss that it was given. Examples are made ahead of
need by a thread, so that a step never waits for self-play. Scores are computed in the reward pool
while the device goes on.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tiktoken
import torch
from torch import Tensor

from .config import Config
from .losses import KL_IN_REWARD, LOSSES, advantages
from .model.encoding import decode, encode_answers, encode_prompts
from .model.transformer import Transformer
from .reference import Reference
from .rewards import PendingRewards, RewardScorer
from .runtime import accel
from .runtime.distributed import DistContext
from .runtime.logging import PhaseTimer
from .runtime.oom import OOMBackoff
from .runtime.pool import Job, WorkerPool
from .runtime.rng import uniforms
from .sampling.cuda_graphs import CUDAGraphCache
from .sampling.decoders import (
    Decoder,
    ReplicatedPrefixDecoder,
    SharedPrefixDecoder,
    UncachedDecoder,
)
from .sampling.generate import SamplingParams, generate
from .types import Completions, Example, RewardTable, RolloutBatch, Task

STEPS_AHEAD = 8  # how many steps' examples are made before they are needed
GREEDY = SamplingParams()  # without uniform numbers


class Source(Protocol):
    def batch(self, step: int) -> RolloutBatch:
        """This process's share of a step's batch, on the host; a pure function of (config, step,
        weights).
        """


class ExamplePrefetcher:
    """Examples of a step, made in the background for the steps to come."""

    def __init__(self, task: Task, config: Config, dist: DistContext, first_step: int) -> None:
        self.task, self.per_step, self.last_step = (
            task,
            config.sampling.prompts_per_step,
            config.run.max_steps,
        )
        self.share = dist.share(self.per_step)
        self.pool = WorkerPool(1, "examples")
        self.jobs: dict[int, Job] = {}
        self._submit(first_step)

    def take(self, step: int) -> list[Example]:
        """The step's examples that are this process's."""
        self._submit(step)
        examples: list[Example] = self.jobs.pop(step).future.result()
        return examples

    def instead(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """Other examples for some places of the share, that no step draws at first."""
        block = self.last_step + (step + attempt * self.last_step)
        return [self.task.train(block * self.per_step + self.share[place]) for place in places]

    def _submit(self, step: int) -> None:
        for ahead in range(step, min(step + STEPS_AHEAD, self.last_step)):
            if ahead not in self.jobs:
                self.jobs[ahead] = self.pool.submit(self._make, ahead)

    def _make(self, step: int) -> list[Example]:
        return [self.task.train(step * self.per_step + i) for i in self.share]


class Sampler:
    """Completions of examples by the model as it is."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: tiktoken.Encoding,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        warn: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.config, self.tokenizer, self.autocast = config, tokenizer, autocast
        self.model = accel.sharing_weights(
            model
        )  # never compiled: its shapes are others in every round
        self.eos = tokenizer.eot_token
        cached = SharedPrefixDecoder if config.memory.share_prompt_kv else ReplicatedPrefixDecoder
        self.decoder: Callable[..., Decoder] = cached if config.speed.kv_cache else UncachedDecoder
        self.graphs = CUDAGraphCache()
        if config.speed.cuda_graphs:
            self.decoder = self.graphs.decoder
        self.low = accel.low_precision_copy(config, self.model)
        # how many prompts fit, by how many samples each gets: training and evaluation differ
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", 0, warn)
        )
        self.work = Counter[
            str
        ]()  # rounds of decoding and tokens that the model ran, since somebody last cleared it

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        params: SamplingParams = GREEDY,
        batch_size: int = 0,
    ) -> Iterator[Completions]:
        """`num_samples` completions of each example, on the host; greedy without uniform numbers `u
        [P, G, S]`.

        `batch_size` prompts are decoded together (0: all) and handed over as they are done; it
        changes nothing but memory and time.
        """
        config, device = self.config, self.model.device
        prompt_ids, prompt_len = encode_prompts(
            self.tokenizer, examples, self.model.shape.context - config.sampling.max_new_tokens
        )
        drafts = (
            encode_answers(self.tokenizer, examples)[0]
            if config.speed.speculative_decoding
            else None
        )
        done = 0
        accel.refresh(self.low, self.model)

        def some(size: int) -> Completions:
            cut = slice(done, done + size)
            with self.autocast():
                return generate(
                    self.low if torch.is_autocast_enabled(device.type) else self.model,
                    prompt_ids[cut].to(device),
                    prompt_len[cut].to(device),
                    eos=self.eos,
                    max_new_tokens=config.sampling.max_new_tokens,
                    num_samples=num_samples,
                    u=None if u is None else torch.from_numpy(u[cut]).to(device),
                    params=params,
                    decoder=self.decoder,
                    drafts=None if drafts is None else drafts[cut].to(device),
                    num_speculative_tokens=config.speed.num_speculative_tokens,
                    work=self.work,
                )

        while done < len(examples):
            left = len(examples) - done
            part = self.backoffs[num_samples].run(
                some, min(batch_size or left, left), self.graphs.reset
            )
            done += len(part)
            yield part.to("cpu")


def describe(batch: RolloutBatch, eos: int) -> dict[str, float]:
    """Metrics of a batch as it was sampled, under TRL's names. Means over its prompts, but for the
    counts under tokens/.
    """
    mask = batch.completions.completion_mask
    lengths = mask.sum(-1)
    values = {"completions/mean_length": lengths.float().mean().item()}
    # what the update would have run with every prompt repeated; tokens/run is what it did run
    inputs = (
        batch.completions.prompt_len.sum() * lengths.shape[1] + (lengths - 1).clamp(min=0).sum()
    )
    values["tokens/repeated"] = float(inputs)
    if batch.rewards is None:
        return values
    total, log_kept_mass = batch.rewards.total, batch.completions.log_kept_mass
    if log_kept_mass is not None:
        values["sampling/removed_mass"] = float((1 - log_kept_mass.exp())[mask].mean())
    return {
        "reward": float(total.mean()),
        "reward_std": float(total.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(has_zero_variance(batch.rewards).mean()),
        **{
            f"rewards/{name}/mean": float(scores.mean())
            for name, scores in batch.rewards.parts.items()
        },
        **{
            f"rewards/{name}/failures": float(count)
            for name, count in batch.rewards.failures.items()
        },
        "completions/clipped_ratio": 1 - float(has_ended(batch.completions, eos).float().mean()),
        **values,
        **batch.metrics,
    }


def has_zero_variance(rewards: RewardTable) -> np.ndarray:
    """`[P]` whether all completions of a prompt have the same reward: nothing can be learnt from
    them.
    """
    return rewards.total.max(1) == rewards.total.min(1)


def has_ended(completions: Completions, eos: int) -> Tensor:
    """`[P, G]` whether a completion ends with end of text; the others were cut off."""
    last = (completions.completion_mask.sum(-1, keepdim=True) - 1).clamp(min=0)
    return completions.completion_ids.gather(-1, last)[..., 0] == eos


def overlong_punishment(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """0 up to `longest - buffer` tokens, then down to -1 at `longest` (DAPO's soft overlong
    punishment, arXiv 2503.14476).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)


class SupervisedBatches:
    """The true completions, one a prompt: the supervised warm start."""

    def __init__(
        self,
        examples: ExamplePrefetcher,
        tokenizer: tiktoken.Encoding,
        timer: PhaseTimer,
        context: int,
    ) -> None:
        self.examples, self.tokenizer, self.timer, self.context = (
            examples,
            tokenizer,
            timer,
            context,
        )

    def batch(self, step: int) -> RolloutBatch:
        with self.timer.phase("data"):
            examples = self.examples.take(step)
            ids, lengths = encode_answers(self.tokenizer, examples)
            prompt_ids, prompt_len = encode_prompts(
                self.tokenizer, examples, self.context - ids.shape[1]
            )
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        completions = Completions(prompt_ids, prompt_len, ids[:, None], mask[:, None])
        return RolloutBatch(examples, completions, [[example.answer] for example in examples])


@dataclass(frozen=True)
class _Rolled:
    """Sampled completions of some examples, and their rewards to come."""

    examples: list[Example]
    completions: Completions
    texts: list[list[str]]
    pending: list[PendingRewards]


class RolloutBatches:
    """Completions sampled from the model as it is, scored, and turned into advantages."""

    def __init__(
        self,
        config: Config,
        examples: ExamplePrefetcher,
        sampler: Sampler,
        scorer: RewardScorer,
        reference: Reference,
        timer: PhaseTimer,
        dist: DistContext,
    ) -> None:
        self.config, self.examples, self.sampler, self.dist = config, examples, sampler, dist
        self.scorer, self.reference, self.timer = scorer, reference, timer

    def batch(self, step: int) -> RolloutBatch:
        config, metrics = self.config, dict[str, float]()
        self.sampler.work.clear()
        with self.timer.phase("data"):
            examples = self.examples.take(step)
        rolled = self._roll(examples, step)
        if config.sampling.dynamic_sampling:
            rolled, rewards, metrics = self._resample(rolled, step)
            ref_logp = self._reference(rolled.completions)
        else:
            ref_logp = self._reference(rolled.completions)  # while the pool scores
            rewards = self._rewards(rolled)
        return RolloutBatch(
            examples=rolled.examples,
            completions=rolled.completions,
            texts=rolled.texts,
            rewards=rewards,
            advantages=self._advantages(
                torch.from_numpy(rewards.total), rolled.completions, ref_logp
            ),
            ref_logp=ref_logp,
            loss_mask=self._ended(rolled.completions) if config.loss.overlong == "mask" else None,
            metrics=metrics | self._work(),
        )

    def _work(self) -> dict[str, float]:
        """How long decoding took: rounds of the batch and of a completion, and tokens that the
        model ran.
        """
        work = self.sampler.work
        each = work["row_rounds"] / max(1, work["rows"])
        return {
            "rollout/rounds": float(work["rounds"]),
            "rollout/rounds_each": each,
            "rollout/tokens": float(work["tokens"]),
        }

    def sample(self, examples: Sequence[Example], step: int) -> Iterator[Completions]:
        """Completions of a step's examples; each depends on nothing but its prompt, seed, step and
        the weights.
        """
        config = self.config
        rows = np.array([example.index for example in examples])
        return self.sampler.complete(
            examples,
            num_samples=config.sampling.group_size,
            u=uniforms(
                config.run.seed,
                "sample",
                step,
                rows,
                config.sampling.group_size,
                config.sampling.max_new_tokens,
            ),
            params=SamplingParams(
                config.sampling.temperature, config.sampling.top_k, config.sampling.top_p
            ),
            batch_size=config.memory.rollout_batch_size,
        )

    def _roll(self, examples: list[Example], step: int) -> _Rolled:
        """Sample, and have each part scored as soon as it is decoded."""
        parts, pending = list[Completions](), list[PendingRewards]()
        texts: list[list[str]] = []
        sampled = self.sample(examples, step)
        while True:
            with self.timer.phase("rollout"):
                part = next(sampled, None)
                if part is None:
                    break
                part_texts = decode(self.sampler.tokenizer, part)
            with self.timer.phase("reward"):
                scores = self.scorer.submit(
                    examples[len(texts) : len(texts) + len(part)], part_texts
                )
                if not self.config.speed.overlap_rewards:
                    scores.result()
            parts.append(part)
            texts += part_texts
            pending.append(scores)
        return _Rolled(examples, Completions.join(parts), texts, pending)

    def _rewards(self, rolled: _Rolled) -> RewardTable:
        with self.timer.phase("reward"):
            return RewardTable.join([scores.result() for scores in rolled.pending])

    def _reference(self, completions: Completions) -> Tensor | None:
        with self.timer.phase("reference"):
            return self.reference.logp(completions)

    def _resample(
        self, rolled: _Rolled, step: int
    ) -> tuple[_Rolled, RewardTable, dict[str, float]]:
        """Put other prompts in the place of dead groups, a bounded number of times; then take what
        there is.
        """
        tries, tables = [rolled], [self._rewards(rolled)]
        where = np.arange(
            len(rolled.examples)
        )  # which group of all tries stands at each place of the share
        for attempt in range(self.config.sampling.dynamic_sampling):
            dead = np.flatnonzero(has_zero_variance(RewardTable.join(tables).select(where)))
            if not len(dead):
                break
            start = sum(len(one.examples) for one in tries)
            tries.append(self._roll(self.examples.instead(step, attempt, dead.tolist()), step))
            tables.append(self._rewards(tries[-1]))
            where[dead] = start + np.arange(len(dead))
        examples = [example for one in tries for example in one.examples]
        texts = [group for one in tries for group in one.texts]
        completions = Completions.join([one.completions for one in tries]).select(
            torch.from_numpy(where)
        )
        chosen = _Rolled([examples[i] for i in where], completions, [texts[i] for i in where], [])
        rewards = RewardTable.join(tables).select(where)
        return (
            chosen,
            rewards,
            {"frac_reward_zero_std/drawn": float(has_zero_variance(tables[0]).mean())},
        )

    def _advantages(
        self, total: Tensor, completions: Completions, ref_logp: Tensor | None
    ) -> Tensor:
        config, spec = self.config, LOSSES[self.config.loss.name]
        lengths = completions.completion_mask.sum(-1)
        if (
            config.loss.kl == KL_IN_REWARD
            and ref_logp is not None
            and completions.sampler_logp is not None
        ):
            total = total - config.loss.kl_coef * (completions.sampler_logp - ref_logp).sum(-1)
        if config.loss.overlong == "punish":
            total = total + overlong_punishment(
                lengths, config.sampling.max_new_tokens, config.loss.overlong_buffer
            )
        estimator = spec.advantage if config.loss.advantage == "auto" else config.loss.advantage
        scale = spec.scale if config.loss.scale == "auto" else config.loss.scale
        everyone = advantages(
            self.dist.gather(total), estimator=estimator, scale=scale
        )  # scale=batch looks at all
        return everyone[self.dist.rank * len(total) :][: len(total)]

    def _ended(self, completions: Completions) -> Tensor:
        return has_ended(completions, self.sampler.tokenizer.eot_token)

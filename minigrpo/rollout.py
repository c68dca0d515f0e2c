"""The batches of a run: completions sampled from the policy and scored, or the true answers.

`RolloutBatches` samples, scores and computes advantages; `SupervisedBatches` takes the true answers
for the warm start. The trainer treats both alike. Decoding itself is in sampling/, scoring in
rewards.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .losses import KL_IN_REWARD, LOSSES, advantages
from .model.encoding import decode, encode_pairs
from .model.tokenizer import Tokenizer
from .reference import Reference
from .rewards import PendingRewards, RewardScorer
from .runtime.distributed import DistContext
from .runtime.flags import ConfigError
from .runtime.logging import PhaseTimer
from .runtime.loss_arguments import FLOAT32_UP_TO, LARGEST_REWARD
from .runtime.prefetch import ExamplePrefetcher
from .runtime.rng import stream, uniforms
from .runtime.rollout_metrics import decoding_metrics, has_ended, has_zero_variance
from .sampling.generate import SamplingParams
from .sampling.sampler import Sampler
from .types import Completions, Example, RewardTable, RolloutBatch


class BatchSource(Protocol):
    """What the trainer needs from either source of batches."""

    def batch(self, step: int) -> RolloutBatch:
        """This process's share of a step's batch, on the host.

        A pure function of the config, the step and the weights.
        """


class SupervisedBatches:
    """The true answers, one per prompt, for the supervised warm start."""

    def __init__(
        self, examples: ExamplePrefetcher, tokenizer: Tokenizer, timer: PhaseTimer, context: int
    ) -> None:
        """`context` is the model's number of positions, for prompt and answer together."""
        self.examples, self.tokenizer = examples, tokenizer
        self.timer, self.context = timer, context

    def batch(self, step: int) -> RolloutBatch:
        with self.timer.phase("data"):
            examples = self.examples.take(step)
            completions = encode_pairs(self.tokenizer, examples, self.context)
        return RolloutBatch(examples, completions, [[example.answer] for example in examples])


@dataclass(frozen=True)
class Rollout:
    """Completions sampled for some examples, and their pending rewards."""

    examples: list[Example]
    completions: Completions
    texts: list[list[str]]  # [P][G]
    pending: list[PendingRewards]  # one per rollout batch


class RolloutBatches:
    """Samples completions from the policy, scores them, and turns rewards into advantages."""

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
        metrics = dict[str, float]()
        self.sampler.work.clear()
        with self.timer.phase("data"):
            examples = self.examples.take(step)
        rollout = self.roll_out(examples, step)
        if self.config.sampling.dynamic_sampling:
            rollout, rewards, metrics = self._replace_zero_variance(rollout, step)
            ref_logp = self._ref_logp(rollout.completions)
        else:
            ref_logp = self._ref_logp(rollout.completions)  # while the pool scores
            rewards = self._rewards(rollout)
        mask_overlong, stops = self.config.loss.overlong == "mask", self.sampler.stops
        return RolloutBatch(
            examples=rollout.examples,
            completions=rollout.completions,
            texts=rollout.texts,
            rewards=rewards,
            advantages=self._advantages(rollout, rewards, ref_logp, step),
            ref_logp=ref_logp,
            loss_mask=has_ended(rollout.completions, stops) if mask_overlong else None,
            metrics=metrics | decoding_metrics(self.sampler.work, self.sampler.sources),
        )

    # --- sampling and scoring -------------------------------------------------------------------

    def sample(self, examples: Sequence[Example], step: int) -> Iterator[Completions]:
        """Completions of a step's examples, in batches of --rollout-batch-size prompts.

        A completion depends only on its example, the seed, the step and the weights, not on what
        else is in the batch.
        """
        sampling = self.config.sampling
        rows = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        return self.sampler.complete(
            examples,
            num_samples=sampling.group_size,
            u=uniforms(self.config.run.seed, "sample", step, rows, *size),
            params=SamplingParams.of(sampling),
            batch_size=self.config.memory.rollout_batch_size,
        )

    def roll_out(self, examples: list[Example], step: int) -> Rollout:
        """Sample, and submit each rollout batch for scoring as soon as it is decoded."""
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
                part_examples = examples[len(texts) : len(texts) + len(part)]
                scores = self.scorer.submit(part_examples, part_texts)
                if not self.config.speed.overlap_rewards:
                    scores.result()
            parts.append(part)
            texts += part_texts
            pending.append(scores)
        return Rollout(examples, Completions.join(parts), texts, pending)

    def _rewards(self, rollout: Rollout) -> RewardTable:
        with self.timer.phase("reward"):
            table = RewardTable.join([scores.result() for scores in rollout.pending])
            rolled = rollout.examples, rollout.texts, rollout.completions
            return self.scorer.with_token_parts(table, *rolled, self.config.sampling.temperature)

    def _ref_logp(self, completions: Completions) -> Tensor | None:
        with self.timer.phase("reference"):
            return self.reference.logp(completions)

    def _replace_zero_variance(
        self, rollout: Rollout, step: int
    ) -> tuple[Rollout, RewardTable, dict[str, float]]:
        """Replace the prompts of zero-variance groups, up to --dynamic-sampling times."""
        rollouts, tables = [rollout], [self._rewards(rollout)]
        # for each prompt of this process's share, the index of its group among all rollouts
        chosen = np.arange(len(rollout.examples))
        for attempt in range(self.config.sampling.dynamic_sampling):
            equal = np.flatnonzero(has_zero_variance(RewardTable.join(tables).select(chosen)))
            if not len(equal):
                break
            first = sum(len(one.examples) for one in rollouts)
            others = self.examples.replacements(step, attempt, equal.tolist())
            rollouts.append(self.roll_out(others, step))
            tables.append(self._rewards(rollouts[-1]))
            chosen[equal] = first + np.arange(len(equal))
        examples = [example for one in rollouts for example in one.examples]
        texts = [group for one in rollouts for group in one.texts]
        completions = Completions.join([one.completions for one in rollouts])
        completions = completions.select(torch.from_numpy(chosen))
        kept = Rollout([examples[i] for i in chosen], completions, [texts[i] for i in chosen], [])
        drawn = {"frac_reward_zero_std/drawn": float(has_zero_variance(tables[0]).mean())}
        return kept, RewardTable.join(tables).select(chosen), drawn

    # --- advantages -----------------------------------------------------------------------------

    def _advantages(
        self, rollout: Rollout, rewards: RewardTable, ref_logp: Tensor | None, step: int
    ) -> Tensor:
        """`[P, G]`; the rewards of all processes are gathered, because --scale batch needs them."""
        loss, spec = self.config.loss, LOSSES[self.config.loss.name]
        completions, share = rollout.completions, len(rewards.total)
        total = torch.from_numpy(rewards.total)
        if loss.shuffle_rewards:
            total = shuffled(total, rollout.examples, self.config.run.seed, step)
        if (
            loss.kl == KL_IN_REWARD
            and ref_logp is not None
            and completions.sampler_logp is not None
        ):
            total = total - loss.kl_coef * (completions.sampler_logp - ref_logp).sum(-1)
        if loss.overlong == "punish":
            lengths = completions.completion_mask.sum(-1)
            longest = self.config.sampling.max_new_tokens
            total = total + overlong_punishment(lengths, longest, loss.overlong_buffer)
        estimator = spec.advantage if loss.advantage == "auto" else loss.advantage
        scale = spec.scale if loss.scale == "auto" else loss.scale
        # float64 for the gather, because each process has its own precision; then float32, unless
        # that would merge different rewards
        total = self.dist.gather(total.double())
        if not (total.abs() <= LARGEST_REWARD).all():  # such as a NaN: the learner skips the step
            return torch.full((share, total.shape[1]), torch.nan)
        small = bool((total.abs() <= FLOAT32_UP_TO).all())
        rewards_of_all = total.float() if small else total
        try:
            everyone = advantages(rewards_of_all, estimator=estimator, scale=scale).float()
        except ValueError as error:  # a negative reward with --scale mean; all processes see it
            raise ConfigError(str(error)) from None
        return everyone[self.dist.rank * share :][:share]


def shuffled(total: Tensor, examples: Sequence[Example], seed: int, step: int) -> Tensor:
    """`[P, G]` rewards, shuffled within each group, so that they say nothing about the texts."""
    draws = [stream(seed, "shuffle", step, example.index) for example in examples]
    rows = [rng.permutation(row) for rng, row in zip(draws, total.numpy(), strict=True)]
    return torch.from_numpy(np.stack(rows))


def overlong_punishment(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """0 up to `longest - buffer` tokens, then linearly down to -1 at `longest`.

    DAPO's soft overlong punishment (arXiv 2503.14476).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)

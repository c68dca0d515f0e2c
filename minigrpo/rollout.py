"""The batches of a run: completions sampled from the policy and scored.

In supervised fine-tuning, they are the true answers. The trainer and the learner treat both alike.
Decoding itself is in sampling/, scoring in rewards.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .build import Parts
from .losses import KL_IN_REWARD, advantages, decoupled
from .metrics import Graded
from .model.encoding import encode_pairs
from .runtime.device import PhaseTimer
from .runtime.distributed import DistContext
from .runtime.prefetch import ExamplePrefetcher
from .runtime.rng import stream, uniforms
from .types import ConfigError, Example, RolloutBatch


class Batches:
    """Samples completions from the policy, scores them, and turns rewards into advantages."""

    def __init__(
        self, parts: Parts, timer: PhaseTimer, dist: DistContext, visits: dict[int, list[int]]
    ) -> None:
        """`visits`: those of the learner, for --rest-solved."""
        self.config, self.timer, self.dist = parts.config, timer, dist
        self.sampler, self.scorer, self.spec = parts.sampler, parts.scorer, parts.loss
        self.reference = parts.reference  # now, when the model is what it is at the start
        self.prefetcher = ExamplePrefetcher(parts.config, parts.task, dist, visits)

    def batch(self, step: int) -> RolloutBatch:
        """This process's share of a step's batch.

        A pure function of the config, the step, the weights, and with --rest-solved of the visits.
        """
        config, sampling, sampler = self.config, self.config.sampling, self.sampler
        with self.timer.phase("data"):
            examples = self.prefetcher.take(step)
            if config.supervised:
                pairs = encode_pairs(sampler.tokenizer, examples, sampler.model.shape.context)
                return RolloutBatch(examples, pairs, [[example.answer] for example in examples])
        sampler.work.clear()
        batch, metrics = self.roll_out(examples, step), dict[str, float]()
        assert batch.rewards is not None
        if sampling.rest_solved:
            graded = Graded(examples, batch.texts, batch.rewards, self.scorer.success)
            right = torch.from_numpy(graded.right.min(1) == 1).int()
            self.prefetcher.visits[step + 1] = self.dist.gather(right).tolist()
        for name, failed in batch.rewards.failures.items():
            if step == 0 and failed == batch.rewards.total.size:
                raise ConfigError(f"reward {name} fails on all completions of the first step")
        if sampling.dynamic_sampling:
            metrics["frac_reward_zero_std/drawn"] = float(batch.rewards.zero_variance.mean())
            batch = self._replace_zero_variance(batch, step)
        ref_logp = None
        if self.reference:
            with self.timer.phase("reference"):
                ref_logp = self.reference.logp(batch.completions, sampling.temperature)
        ended = batch.completions.ended(sampler.stops)
        metrics |= {f"rollout/{name}": float(sampler.work[name]) for name in ("rounds", "tokens")}
        return replace(
            batch,
            advantages=self._advantages(batch, ref_logp, step),
            ref_logp=ref_logp,
            loss_mask=ended if config.loss.overlong == "mask" else None,
            metrics=metrics,
        )

    def roll_out(self, examples: Sequence[Example], step: int) -> RolloutBatch:
        """Sample a group for each example, by the seed, the step and the weights; score it."""
        config, sampling = self.config, self.config.sampling
        rows = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        with self.timer.phase("rollout"):
            completions, texts = self.sampler.complete(
                examples,
                num_samples=sampling.group_size,
                u=uniforms(config.run.seed, "sample", step, rows, *size),
                sampling=sampling,
                batch_size=config.memory.rollout_batch_size,
            )
        with self.timer.phase("reward"):
            rewards = self.scorer.score(examples, texts, completions, sampling.temperature)
        return RolloutBatch(examples, completions, texts, rewards)

    def _replace_zero_variance(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Replace the prompts of zero-variance groups, up to --dynamic-sampling times."""
        for attempt in range(self.config.sampling.dynamic_sampling):
            assert batch.rewards is not None
            equal = np.flatnonzero(batch.rewards.zero_variance)
            if not len(equal):
                break
            others = self.prefetcher.replacements(step, attempt, equal.tolist())
            rows = np.arange(len(batch))
            rows[equal] = len(batch) + np.arange(len(equal))
            batch = batch.join(self.roll_out(others, step)).select(rows.tolist())
        return batch

    def _advantages(self, batch: RolloutBatch, ref_logp: Tensor | None, step: int) -> Tensor:
        """`[P, G]`; the rewards of all processes are gathered, because --scale batch needs them."""
        loss, spec, completions = self.config.loss, self.spec, batch.completions
        assert batch.rewards is not None
        total = torch.from_numpy(batch.rewards.total)  # float64
        if total.shape[1] == 1:
            return torch.zeros(total.shape)  # nothing to compare with: the signal is a teacher's
        scale = spec.scale if loss.scale == "auto" else loss.scale
        if loss.aggregate == "normalize-then-sum":
            parts = {name: torch.from_numpy(x) for name, x in batch.rewards.parts.items()}
            total, scale = decoupled(parts, self.scorer.weights), "batch"
        if loss.shuffle_rewards:
            total = shuffled(total, batch.examples, self.config.run.seed, step)
        if ref_logp is not None and loss.kl == KL_IN_REWARD:
            assert completions.sampler_logp is not None
            total = total - loss.kl_coef * (completions.sampler_logp - ref_logp).sum(-1)
        if loss.overlong == "punish":
            longest = self.config.sampling.max_new_tokens
            total = total + overlong_punishment(completions.completion_len, longest)
        total = self.dist.gather(total)
        if total.isfinite().all():
            everyone = advantages(total, estimator=spec.estimator, scale=scale).float()
        else:
            everyone = torch.full(total.shape, torch.nan)  # the guard skips the step
        share = len(batch)
        return everyone[self.dist.rank * share :][:share]


def shuffled(total: Tensor, examples: Sequence[Example], seed: int, step: int) -> Tensor:
    """`[P, G]` rewards, shuffled within each group, so that they say nothing about the texts."""
    pairs = zip(examples, total.numpy(), strict=True)
    rows = [stream(seed, "shuffle", step, x.index).permutation(row) for x, row in pairs]
    return torch.from_numpy(np.stack(rows))


def overlong_punishment(lengths: Tensor, longest: int) -> Tensor:
    """DAPO's (arXiv 2503.14476): 0 up to four fifths of `longest`, then linearly down to -1."""
    buffer = longest / 5
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)

"""The batches of a run: completions sampled from the policy and scored, or true answers.

The trainer and the learner treat both alike. Decoding itself is in sampling/, scoring in
rewards.py, and advantages in advantages.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .advantages import advantages, decoupled, overlong_punishment, shuffled
from .config import Config
from .losses import KL_IN_REWARD, LossSpec
from .model.encoding import encode_pairs
from .model.frozen_model import FrozenModel
from .model.tokenizer import Tokenizer
from .rewards import RewardScorer
from .runtime.device import PhaseTimer
from .runtime.distributed import DistContext
from .runtime.prefetch import ExamplePrefetcher
from .runtime.rng import uniforms
from .sampling.sampler import Sampler
from .types import Example, RolloutBatch


@dataclass(eq=False)
class SupervisedBatches:
    """True answers, one for each prompt; for `batch` see RolloutBatches."""

    prefetcher: ExamplePrefetcher
    tokenizer: Tokenizer
    context: int  # the most tokens that a prompt and its answer may have
    timer: PhaseTimer

    def batch(self, step: int) -> RolloutBatch:
        with self.timer.phase("data"):
            examples = self.prefetcher.take(step)
            pairs = encode_pairs(self.tokenizer, examples, self.context)
            return RolloutBatch(examples, pairs, [[example.answer] for example in examples])


@dataclass(eq=False)
class RolloutBatches:
    """Samples completions from the policy, scores them, and turns rewards into advantages."""

    config: Config
    prefetcher: ExamplePrefetcher
    sampler: Sampler
    scorer: RewardScorer
    loss: LossSpec  # says how advantages are formed
    reference: FrozenModel | None  # of --kl-coef
    teacher: FrozenModel | None
    dist: DistContext
    timer: PhaseTimer

    def batch(self, step: int) -> RolloutBatch:
        """This process's share: a pure function of the config, the step and the weights."""
        sampling = self.config.sampling
        # 1. Sample and score.
        with self.timer.phase("data"):
            examples = self.prefetcher.take(step)
        work = self.sampler.work
        work.clear()
        batch = self.roll_out(examples, step)
        assert batch.rewards is not None
        metrics: dict[str, float] = {}
        if sampling.dynamic_sampling:
            metrics["frac_reward_zero_std/drawn"] = float(batch.rewards.zero_variance.mean())
            batch = self._replace_zero_variance(batch, step)

        # 2. Log-probs of frozen models.
        ref_logp = teacher_logp = None
        if self.reference:
            with self.timer.phase("reference"):
                ref_logp = self.reference.logp(batch.completions, sampling.temperature)
        if self.teacher:
            with self.timer.phase("teacher"):
                read = self.teacher.reads(batch, self.config.loss.teacher_context)
                teacher_logp = self.teacher.logp(read, sampling.temperature)

        # 3. Advantages.
        metrics |= {f"rollout/{name}": float(work[name]) for name in ("rounds", "tokens")}
        masks_overlong = self.config.loss.overlong == "mask"
        return replace(
            batch,
            advantages=self._advantages(batch, ref_logp, step),
            ref_logp=ref_logp,
            teacher_logp=teacher_logp,
            loss_mask=batch.ended(self.sampler.stops) if masks_overlong else None,
            metrics=metrics,
        )

    def roll_out(self, examples: Sequence[Example], step: int) -> RolloutBatch:
        """Sample a group for each example, by the seed, the step and the weights; score it."""
        config = self.config
        sampling = config.sampling
        indices = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        with self.timer.phase("rollout"):
            completions, texts = self.sampler.complete(
                examples,
                num_samples=sampling.group_size,
                u=uniforms(config.run.seed, "sample", step, indices, *size),
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
            batch = batch.join(self.roll_out(others, step)).select(rows)
        return batch

    def _advantages(self, batch: RolloutBatch, ref_logp: Tensor | None, step: int) -> Tensor:
        """`[P, G]`; the rewards of all processes are gathered, because --scale batch needs them."""
        settings = self.config.loss
        completions = batch.completions
        assert batch.rewards is not None
        total = torch.from_numpy(np.nan_to_num(batch.rewards.total))  # float64
        if total.shape[1] == 1:
            return torch.zeros(total.shape)  # nothing to compare with: the signal is a teacher's
        scale = self.loss.scale if settings.scale == "auto" else settings.scale
        if settings.aggregate == "normalize-then-sum":
            total = decoupled(batch.rewards.parts, self.scorer.weights)
            scale = "batch"
        if settings.shuffle_rewards:
            total = shuffled(total, batch.examples, self.config.run.seed, step)
        if ref_logp is not None and settings.kl == KL_IN_REWARD:
            assert completions.sampler_logp is not None
            total = total - settings.kl_coef * (completions.sampler_logp - ref_logp).sum(-1)
        if settings.overlong == "punish":
            longest = self.config.sampling.max_new_tokens
            total = total + overlong_punishment(completions.completion_len, longest)
        total = self.dist.gather(total)
        if total.isfinite().all():
            everyone = advantages(total, estimator=self.loss.estimator, scale=scale).float()
        else:
            everyone = torch.full(total.shape, torch.nan)  # the guard skips the step
        share = len(batch)
        return everyone[self.dist.rank * share :][:share]

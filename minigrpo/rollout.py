"""The batches of a run: completions sampled from the policy and scored, or true answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .advantages import advantages, shuffled
from .config import Config
from .losses import LossSpec
from .model.frozen_model import FrozenModel
from .rewards.scorer import RewardScorer
from .rng import uniforms
from .runtime.device import PhaseTimer
from .runtime.distributed import DistContext
from .sampling.sampler import Sampler
from .tasks.base import ExamplePrefetcher
from .text.encoding import encode_pairs
from .text.tokenizer import Tokenizer
from .types import Completion, Example, RolloutBatch


@dataclass(eq=False)
class SupervisedBatches:
    """True answers, one for each prompt."""

    prefetcher: ExamplePrefetcher
    tokenizer: Tokenizer
    context: int  # the most tokens that a prompt and its answer may have
    timer: PhaseTimer

    def batch(self, step: int) -> RolloutBatch:
        with self.timer.phase("data"):
            examples = self.prefetcher.take(step)
            pairs = encode_pairs(self.tokenizer, examples, self.context)
            texts = [[Completion(example.answer)] for example in examples]
            return RolloutBatch(examples, pairs, texts)


@dataclass(eq=False)
class RolloutBatches:
    """Samples completions from the policy, scores them, and turns rewards into advantages."""

    config: Config
    prefetcher: ExamplePrefetcher
    sampler: Sampler
    scorer: RewardScorer
    spec: LossSpec  # says how advantages are formed
    reference: FrozenModel | None  # of --kl-coef
    teacher: FrozenModel | None
    dist: DistContext
    timer: PhaseTimer

    def batch(self, step: int) -> RolloutBatch:
        """This process's share: a pure function of the config, the step and the weights."""
        sampling = self.config.sampling
        # 1. Completions and their rewards.
        with self.timer.phase("data"):
            examples = self.prefetcher.take(step)
        with self.sampler.current_model:
            batch = self.roll_out(examples, step)
            if sampling.dynamic_sampling:
                batch = self._replace_zero_variance(batch, step)

        # 2. Log-probs of frozen models.
        if self.reference:
            with self.timer.phase("reference"):
                logp = self.reference.logp_of_batch(batch, sampling.temperature)
            batch = replace(batch, reference_logp=logp)
        if self.teacher:
            field = self.config.loss.teacher_context
            with self.timer.phase("teacher"):
                logp = self.teacher.logp_of_batch(batch, sampling.temperature, field)
            batch = replace(batch, teacher_logp=logp)

        # 3. Advantages.
        if self.config.loss.overlong == "mask":
            batch = replace(batch, loss_mask=batch.ended)
        return replace(batch, advantages=self._group_advantages(batch, step))

    def roll_out(self, examples: Sequence[Example], step: int) -> RolloutBatch:
        """Sample a group for each example, by the seed, the step and the weights; score it."""
        config = self.config
        sampling = config.sampling
        indices = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        with self.timer.phase("rollout"):
            sampled = self.sampler.complete(
                examples,
                num_samples=sampling.group_size,
                uniforms=uniforms(config.run.seed, "sample", step, indices, *size),
                sampling=sampling,
                batch_size=config.memory.rollout_batch_size,
            )
        completions = sampled.completions
        with self.timer.phase("reward"):
            rewards = self.scorer.score(examples, sampled.texts, completions, sampling.temperature)
        work = {"rollout/rounds": sampled.rounds, "rollout/tokens": sampled.tokens}
        return RolloutBatch(examples, completions, sampled.texts, rewards, metrics=work)

    def _replace_zero_variance(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Replace the prompts of zero-variance groups, up to --dynamic-sampling times."""
        drawn: dict[str, float] = {}
        for attempt in range(self.config.sampling.dynamic_sampling):
            assert batch.rewards is not None
            equal = np.flatnonzero(batch.rewards.zero_variance)
            drawn.setdefault("frac_reward_zero_std/drawn", len(equal) / len(batch))
            if not len(equal):
                break
            others = self.prefetcher.replacements(step, attempt, equal.tolist())
            rows = np.arange(len(batch))
            rows[equal] = len(batch) + np.arange(len(equal))
            batch = RolloutBatch.join([batch, self.roll_out(others, step)]).select(rows)
        return replace(batch, metrics={**drawn, **batch.metrics})

    def _group_advantages(self, batch: RolloutBatch, step: int) -> Tensor:
        """`[P, G]`; the rewards of all processes are gathered, because --scale batch needs them."""
        settings = self.config.loss
        assert batch.rewards is not None
        total = torch.from_numpy(batch.rewards.total)  # float64
        if total.shape[1] == 1:
            return torch.zeros(total.shape)  # nothing to compare with: the signal is a teacher's
        scale = self.spec.scale if settings.scale == "auto" else settings.scale
        if settings.shuffle_rewards:
            total = shuffled(total, batch.examples, self.config.run.seed, step)
        shares = self.dist.on_all(lambda: total)
        everyone = advantages(torch.cat(shares), estimator=self.spec.estimator, scale=scale)
        lengths = [len(share) for share in shares]
        return everyone.split(lengths)[self.dist.rank].float()

"""A training step of the library, put together from its parts so that each phase can be timed."""

import copy
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minigrpo.config import Config
from minigrpo.learner import Learner
from minigrpo.model.packing import PACKINGS
from minigrpo.reference import FrozenReference, NoReference, Reference
from minigrpo.rewards import RewardScorer
from minigrpo.rollout import ExamplePrefetcher, RolloutBatches, Sampler
from minigrpo.runtime import accel
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.logging import PhaseTimer
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.types import Completions, RolloutBatch

from .workload import Workload

T = TypeVar("T")


class MeasuredStep(Protocol):
    """What the benchmarks ask of a training step."""

    device: torch.device
    batch: RolloutBatch  # of the last step

    def step(self, number: int) -> dict[str, float]:
        """One training step: its seconds, those of its phases, and how much work it was."""

    def tokens(self) -> Tensor:
        """What the last step sampled, `[P * G, S]`; -1 beyond the end."""

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss."""


class NoBackoff(OOMBackoff):
    """Lets an out-of-memory error through: a row must not run in smaller pieces than it says."""

    def run(
        self,
        function: Callable[[int], T],
        there_are: int,
        forget: Callable[[], object] = lambda: None,
    ) -> T:
        return function(self.of(there_are))


class BenchStep:
    """The library's training step with the flags of a config, on a copy of the workload's model."""

    def __init__(self, config: Config, work: Workload, sampler: type[Sampler] = Sampler) -> None:
        self.config, self.device = config, work.device
        self.model = copy.deepcopy(work.model)
        accel.chunk_logprobs(config, self.model)
        self.learner = Learner(config, self.model)
        self.learner.backoff = NoBackoff("update", "", config.memory.micro_batch_size)
        self.sampler = sampler(config, self.model, work.tokenizer, self.learner.autocast)
        self.sampler.backoffs.default_factory = lambda: NoBackoff("sampling", "", 0)
        if work.forced:
            self.sampler.eos = -1  # no token has this number, so no completion ends early
        scorer = RewardScorer(
            work.task,
            workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
            timeout_s=config.task.reward_timeout,
        )
        reference = self._make_reference()
        accel.checkpoint_blocks(config, self.model)
        accel.compile_blocks(config, self.model)
        self.timer = PhaseTimer(self.device)
        dist = DistContext()
        examples = ExamplePrefetcher(work.task, config, dist, 0)
        self.source = RolloutBatches(
            config, examples, self.sampler, scorer, reference, self.timer, dist
        )
        self.batch: RolloutBatch

    def _make_reference(self) -> Reference:
        if not self.config.loss.kl_coef:
            return NoReference()
        return FrozenReference(
            accel.low_precision_copy(self.config, self.model),
            packing=PACKINGS[self.config.speed.packing],
            temperature=self.config.sampling.temperature,
            backoff=self.learner.backoff,
            autocast=self.learner.autocast,
            offload=self.config.memory.offload_reference,
        )

    def step(self, number: int) -> dict[str, float]:
        """One training step: its seconds, those of its phases, and how much work it was."""
        accel.use_tf32(self.config)  # process-wide, so every step sets it again
        self.timer.take()
        start = time.perf_counter()
        self.batch = self.source.batch(number)
        with self.timer.phase("update"):
            learnt = self.learner.learn(self.batch, number)
        seconds = time.perf_counter() - start
        lengths = self.batch.completions.completion_mask.sum(-1)
        return {
            "seconds": seconds,
            **self.timer.take(),
            "completions": float(lengths.numel()),
            "completion_len": float(lengths.float().mean()),
            **self.batch.metrics,
            "tokens/run": learnt["tokens/run"],
        }

    def tokens(self) -> Tensor:
        """What the last step sampled, `[P * G, S]`; -1 beyond the end."""
        return pad_tokens(self.batch.completions, self.config.sampling.max_new_tokens)

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss.

        Not the loss itself: at a ratio of 1 the advantages cancel, and only rounding is left of it.
        """
        accel.use_tf32(self.config)
        with torch.no_grad():
            parts = batch.split(self.config.memory.micro_batch_size or len(batch))
            logps = [self.learner.forward(part.completions)[0] for part in parts]
            total = sum(float(logp.double().sum()) for logp in logps)
        nll = -total / int(batch.completions.completion_mask.sum())
        self.learner.gradient(*self.learner.prepare(batch))
        gradient = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.model.parameters()
        ]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return nll, gradient


def pad_tokens(completions: Completions, length: int) -> Tensor:
    """`[P * G, length]` sampled tokens, -1 beyond the end, so that two steps can be compared."""
    mask = completions.completion_mask
    ids = torch.where(mask, completions.completion_ids, -1).flatten(0, 1)
    return torch.nn.functional.pad(ids, (0, length - ids.shape[1]), value=-1)

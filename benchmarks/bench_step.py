"""A training step of the library, assembled from its parts so that each phase can be timed."""

import copy
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minigrpo.config import Config
from minigrpo.learner import Learner
from minigrpo.model.transformer import Transformer
from minigrpo.rollout import RolloutBatches
from minigrpo.runtime import accel
from minigrpo.runtime.base_model import add_lora
from minigrpo.runtime.build import make_reference, make_scorer
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.logging import PhaseTimer
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.runtime.prefetch import ExamplePrefetcher
from minigrpo.sampling.sampler import Sampler
from minigrpo.types import Completions, RolloutBatch

from .workload import Workload

T = TypeVar("T")


class MeasuredStep(Protocol):
    """The interface that the benchmarks need of a training step."""

    device: torch.device
    batch: RolloutBatch  # of the last step

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""

    def tokens(self) -> Tensor:
        """What the last step sampled, `[P * G, S]`; -1 beyond the end."""

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss."""


class NoBackoff(OOMBackoff):
    """Raises out-of-memory errors: a row must not silently run in smaller pieces."""

    def run(
        self, function: Callable[[int], T], total: int, free: Callable[[], object] = lambda: None
    ) -> T:
        return function(self.size_of(total))


class BenchStep:
    """The library's training step with the flags of a config, on a copy of the workload's model."""

    def __init__(
        self,
        config: Config,
        work: Workload,
        sampler: type[Sampler] = Sampler,
        model: Transformer | None = None,
    ) -> None:
        """`model` is trained itself; None: a copy of the workload's. --lora-rank adds adapters."""
        self.config, self.device = config, work.device
        self.model = copy.deepcopy(work.model) if model is None else model
        add_lora(self.model, config.model)
        self.model.logprob_chunk = accel.logprob_chunk(config.memory, self.model)
        self.learner = Learner(config, self.model)
        self.learner.backoff = NoBackoff("update", "", config.memory.micro_batch_size)
        self.sampler = sampler(config, self.model, work.tokenizer, self.learner.autocast)
        self.sampler.backoffs.default_factory = lambda: NoBackoff("sampling", "", 0)
        if work.forced:
            self.sampler.stops = ()  # no token ends a completion
        self.timer = PhaseTimer(self.device)
        dist = DistContext()
        self.source = RolloutBatches(
            config,
            ExamplePrefetcher(work.task, config, dist, 0),
            self.sampler,
            make_scorer(config, work.task),
            make_reference(config, self.learner, work.tokenizer),
            self.timer,
            dist,
        )
        self.batch: RolloutBatch

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        # process-wide, so every step sets it again
        accel.set_up_process(self.config.speed, self.device)
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

        Not the loss itself: at a ratio of 1 the advantages cancel, and only rounding error remains.
        """
        accel.set_up_process(self.config.speed, self.device)
        with torch.no_grad():
            parts = batch.split(self.config.memory.micro_batch_size or len(batch))
            logps = [self.learner.forward(self.learner.pack(part.completions))[0] for part in parts]
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

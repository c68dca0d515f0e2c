"""Plan a step: the estimates of estimate.py, with seconds by phase, without running a step.

Seconds are the counts of step_counts.py times the rates that rates.py measures on this machine. If
the model can sample completions of a few prompts within seconds, the plan learns from them how long
completions are, how many proposed tokens are accepted, and how much completions share.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import Config
from ..model.encoding import decode
from ..model.shape import ModelShape
from ..sampling.params import SamplingParams
from ..sampling.sampler import Sampler
from ..types import Completions, Example, Task
from . import accel
from .build import make_model
from .distributed import DistContext
from .estimate import Estimate, estimate_step, some_examples, true_answers
from .machine import memory_limit_mib
from .planned_job import PlannedJob
from .rates import Probe, Rates
from .rng import uniforms
from .step_counts import StepCounts, as_sampled, made_up_completions
from .stored_weights import StoredWeights
from .tokenizers import with_own_tokenizer

PROMPTS_SAMPLED = 4
SECONDS_OF_SAMPLING = 3.0  # a sample that would take longer is left out of the plan


def step_seconds(
    config: Config, shape: ModelShape, counts: StepCounts, rates: Rates, score: float
) -> dict[str, float]:
    """Seconds of a step by phase; `score` is the seconds that a completion's reward takes."""
    n, layers = counts.micro_batches, shape.layers
    tokens, predictions = counts.packed / n, counts.predictions / n
    forward = layers * rates.block_forward.at(tokens) + rates.head_forward.at(predictions)
    gradient = layers * rates.block_gradient.at(tokens) + rates.head_gradient.at(predictions)
    optimizer = StoredWeights.of(config, shape).num_trained * rates.optimizer
    updates = config.optimizer.num_iterations
    seconds = {"update": updates * (n * gradient + optimizer) + n * forward * (updates > 1)}
    if config.supervised:
        return seconds
    prompts = counts.prompt_tokens / counts.rollout_batches
    prefill = counts.rollout_batches * layers * rates.block_forward.at(prompts)
    rounds = counts.rounds * rates.round.fixed + counts.decoded / counts.window * rates.round.each
    reference = {"reference": n * forward} if config.loss.kl_coef else {}
    first = {"rollout": prefill + rounds, "reward": counts.completions * score}
    return {**first, **reference, **seconds}


class Planner:
    """Plans a step of a run: the checks of its start-up, then estimates, without its memory.

    Of an untrained model only the shape is made, so that a plan does not need what the run does.
    """

    def __init__(self, config: Config, dist: DistContext | None = None) -> None:
        """Raises ValueError in one line for whatever the run would not start with."""
        self.config = config = with_own_tokenizer(config)
        self.job = PlannedJob.of(config, dist or DistContext())

    def estimates(self) -> dict[str, Estimate]:
        """Estimates by what they assume; the last one is the most likely.

        Without seconds if the device is not here, because its rates cannot be measured.
        """
        config, job, worst = self.config, self.job, self.job.worst.counts
        if config.supervised and job.task:
            name, completions = "true answers", self._true_answers(job.task)
        else:
            name = "nothing shared"
            completions = made_up_completions(worst, job.shape.vocab_size)
        found = {name: job.worst}
        if job.is_here:
            probe = Probe(config, job.shape, job.tokenizer, job.device)
            rates, score = probe.rates(worst, completions), self._score_answers()
            seconds = step_seconds(config, job.shape, worst, rates, score)
            found[name] = replace(job.worst, seconds=seconds)
            if number := self._prompts_to_sample(rates):
                found["as sampled"] = self._as_sampled(number, probe, rates)
        if job.scorer:
            job.scorer.close()
        return found

    def _as_sampled(self, number: int, probe: Probe, rates: Rates) -> Estimate:
        """The estimate from completions of the run's first prompts."""
        config, job = self.config, self.job
        assert job.task
        examples = [job.task.train(i) for i in range(number)]
        completions, counts = self._sample(examples)
        score = self._score(examples, decode(job.tokenizer, completions))
        sampled = estimate_step(config, job.shape, counts, job.device.type)
        rates = probe.rates_at(rates, counts, completions)
        return replace(sampled, seconds=step_seconds(config, job.shape, counts, rates, score))

    def _true_answers(self, task: Task) -> Completions:
        job = self.job
        return true_answers(some_examples(task), job.tokenizer, job.worst.counts, job.shape)

    def _score_answers(self) -> float:
        """Seconds that the reward of a true answer takes; 0 if nothing is scored."""
        if self.config.supervised or not self.job.task:
            return 0.0
        some = some_examples(self.job.task)
        return self._score(some, [[x.answer] for x in some])

    def _score(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> float:
        """Seconds per completion. Called once: a second time, the scorer remembers."""
        assert self.job.scorer
        start = time.perf_counter()
        self.job.scorer.submit(examples, texts).result()
        return (time.perf_counter() - start) / sum(map(len, texts))

    def _prompts_to_sample(self, rates: Rates) -> int:
        """How many prompts can be sampled in SECONDS_OF_SAMPLING; 0 if none, or without room."""
        job, counts = self.job, self.job.worst.counts
        weights = job.worst.memory_mib["weights"]
        if self.config.supervised or not job.task or 2 * weights > memory_limit_mib(job.device):
            return 0
        for number in range(min(PROMPTS_SAMPLED, counts.prompts), 0, -1):
            share = number / counts.prompts
            some = replace(counts, prompts=number, decoded=counts.decoded * share)
            some = replace(some, prompts_at_once=min(number, counts.prompts_at_once))
            some = replace(some, rounds=counts.rounds / counts.rollout_batches)
            took = step_seconds(self.config, job.shape, some, rates, 0.0)["rollout"]
            if took <= SECONDS_OF_SAMPLING:
                return number
        return 0

    def _sample(self, examples: Sequence[Example]) -> tuple[Completions, StepCounts]:
        """The completions of the run's first prompts, and what a whole step would count."""
        config, job, sampling = self.config, self.job, self.config.sampling
        model = job.model or make_model(config, job.tokenizer)
        sampler = Sampler(
            config,
            model.to(job.device),
            job.tokenizer,
            lambda: accel.autocast(config.speed, job.device),
        )
        rows = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        parts = sampler.complete(
            examples,
            num_samples=sampling.group_size,
            u=uniforms(config.run.seed, "sample", 0, rows, *size),
            params=SamplingParams.of(sampling),
            batch_size=config.memory.rollout_batch_size,
        )
        completions = Completions.join(list(parts))
        return completions, as_sampled(job.worst.counts, config, completions, sampler.work)

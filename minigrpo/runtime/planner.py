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
from ..model.transformer import Transformer
from ..rewards import RewardScorer
from ..sampling.params import SamplingParams
from ..sampling.sampler import Sampler
from ..types import Completions, Example
from . import accel
from .build import check_room, make_model, make_scorer, make_task, make_tokenizer
from .distributed import DistContext
from .estimate import (
    Estimate,
    estimate_step,
    measure_lengths_and_estimate,
    some_examples,
    true_answers,
)
from .examples import check_examples
from .machine import memory_limit_mib
from .rates import Probe, Rates
from .rng import uniforms
from .startup import check_machine
from .step_counts import StepCounts, as_sampled, made_up_completions
from .step_memory import MIB
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
    optimizer = shape.num_parameters * rates.optimizer
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
        dist = dist or DistContext()
        self.config = config = with_own_tokenizer(config)
        self.device = check_machine(config, dist)
        self.tokenizer = make_tokenizer(config)
        self.task = make_task(config)
        self.scorer: RewardScorer = make_scorer(config, self.task)
        self.model: Transformer | None = None
        sizes = config.model
        if sizes.init_from == "scratch":
            vocab_size = self.tokenizer.n_vocab
            self.shape = ModelShape(
                vocab_size, sizes.context, sizes.layers, sizes.width, sizes.heads
            )
            check_room(config, self.shape)
        else:
            self.model = make_model(config, self.tokenizer, self.device)
            self.shape = self.model.shape
        limits = self.shape.context, lambda text: None
        check_examples(config, self.task, self.tokenizer, *limits)
        self.worst = measure_lengths_and_estimate(
            config, self.shape, self.task, self.tokenizer, self.device.type, dist.world_size
        )

    def estimates(self) -> dict[str, Estimate]:
        """Estimates by what they assume; the last one is the most likely."""
        config, worst = self.config, self.worst.counts
        probe, some = (
            Probe(config, self.shape, self.tokenizer, self.device),
            some_examples(self.task),
        )
        if config.supervised:
            name, score = "true answers", 0.0
            completions = true_answers(some, self.tokenizer, worst, self.shape)
        else:
            name, score = "nothing shared", self._score(some, [[x.answer] for x in some])
            completions = made_up_completions(worst, self.shape.vocab_size)
        rates = probe.rates(worst, completions)
        seconds = step_seconds(config, self.shape, worst, rates, score)
        found = {name: replace(self.worst, seconds=seconds)}
        if number := self._prompts_to_sample(rates):
            examples = [self.task.train(i) for i in range(number)]
            completions, counts = self._sample(examples)
            score = self._score(examples, decode(self.tokenizer, completions))
            sampled = estimate_step(config, self.shape, counts, self.device.type)
            rates = probe.rates_at(rates, counts, completions)
            seconds = step_seconds(config, self.shape, counts, rates, score)
            found["as sampled"] = replace(sampled, seconds=seconds)
        self.scorer.close()
        return found

    def _score(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> float:
        """Seconds per completion. Called once: a second time, the scorer remembers."""
        start = time.perf_counter()
        self.scorer.submit(examples, texts).result()
        return (time.perf_counter() - start) / sum(map(len, texts))

    def _prompts_to_sample(self, rates: Rates) -> int:
        """How many prompts can be sampled in SECONDS_OF_SAMPLING; 0 if none, or without room."""
        counts, weights = self.worst.counts, 4.0 * self.worst.parameters / MIB
        if self.config.supervised or 2 * weights > memory_limit_mib(self.device):
            return 0
        for number in range(min(PROMPTS_SAMPLED, counts.prompts), 0, -1):
            share = number / counts.prompts
            some = replace(counts, prompts=number, decoded=counts.decoded * share)
            some = replace(some, prompts_at_once=min(number, counts.prompts_at_once))
            some = replace(some, rounds=counts.rounds / counts.rollout_batches)
            took = step_seconds(self.config, self.shape, some, rates, 0.0)["rollout"]
            if took <= SECONDS_OF_SAMPLING:
                return number
        return 0

    def _sample(self, examples: Sequence[Example]) -> tuple[Completions, StepCounts]:
        """The completions of the run's first prompts, and what a whole step would count."""
        config, sampling = self.config, self.config.sampling
        model = self.model or make_model(config, self.tokenizer, self.device)
        sampler = Sampler(
            config, model, self.tokenizer, lambda: accel.autocast(config.speed, self.device)
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
        return completions, as_sampled(self.worst.counts, config, completions, sampler.work)

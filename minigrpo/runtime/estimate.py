"""Estimate a step before it is run: tokens, FLOPs, memory by kind, and seconds by phase.

step_counts.py counts what a step runs, flops.py and step_memory.py turn counts into FLOPs and
bytes, rates.py measures this machine. Here they are put together, for `minigrpo plan` and for the
table at the end of a run.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tiktoken

from ..config import Config
from ..model.encoding import decode, encode_answers, encode_prompts
from ..model.transformer import ModelShape, Transformer
from ..rewards import RewardScorer
from ..sampling.params import SamplingParams
from ..sampling.sampler import Sampler
from ..types import Completions, Example, Task
from . import accel
from .build import check_room, make_model, make_scorer, make_task, make_tokenizer
from .combinations import check_shares
from .flops import step_flops
from .machine import memory_limit_mib
from .rates import Probe, Rates, made_up_completions
from .rng import uniforms
from .step_counts import StepCounts, as_sampled, nothing_shared
from .step_memory import MIB, StepMemory, num_parameters

EXAMPLES_MEASURED = 64  # to find the mean lengths of prompts and answers
PROMPTS_SAMPLED = 4
SECONDS_OF_SAMPLING = 5.0  # a sample that would take longer is left out of the plan


@dataclass(frozen=True)
class Estimate:
    """One process's share of a step."""

    parameters: int
    counts: StepCounts
    tokens: Mapping[str, float]  # by phase
    flops: Mapping[str, float]  # by phase
    memory_mib: Mapping[str, float]  # by kind; not all of it at the same time
    peak_mib: float  # without the program itself, which takes a few hundred MiB of a CPU's memory
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase; empty if not probed

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def cells(self) -> dict[str, str]:
        """Rows of a table: name -> value."""
        counts = self.counts
        cells = {
            "parameters": f"{self.parameters / 1e6:,.2f} M",
            "micro-batches": str(counts.micro_batches),
            "tokens per completion": f"{counts.completion_len:,.1f}",
        }
        if counts.rounds:
            cells["rounds of decoding"] = f"{counts.rounds:,.0f}"
        cells |= {f"tokens: {name}": f"{count:,.0f}" for name, count in self.tokens.items()}
        cells |= {f"GFLOP: {name}": f"{count / 1e9:,.1f}" for name, count in self.flops.items()}
        cells |= {f"MiB: {name}": f"{size:,.1f}" for name, size in self.memory_mib.items()}
        cells["MiB: peak"] = f"{self.peak_mib:,.1f}"
        cells |= {f"seconds: {name}": f"{s:,.3g}" for name, s in self.seconds.items()}
        return cells | ({"seconds: step": f"{self.step_seconds:,.3g}"} if self.seconds else {})


def estimate_step(config: Config, shape: ModelShape, counts: StepCounts, device: str) -> Estimate:
    """Everything but seconds; `device` is a type, such as cuda."""
    memory = StepMemory(config, shape, counts, device)
    by_kind = memory.by_kind()
    tokens = counts.tokens
    if config.optimizer.num_iterations > 1:
        tokens["old log-probs"] = counts.packed
        tokens["update"] *= config.optimizer.num_iterations
    if config.loss.kl_coef:
        tokens["reference"] = counts.packed
    return Estimate(
        parameters=num_parameters(shape),
        counts=counts,
        tokens=tokens,
        flops=step_flops(config, shape, counts),
        memory_mib={name: amount / MIB for name, amount in by_kind.items() if amount},
        peak_mib=memory.peak(by_kind) / MIB,
    )


def measure_lengths_and_estimate(
    config: Config,
    shape: ModelShape,
    task: Task,
    tokenizer: tiktoken.Encoding,
    device: str,
    world_size: int,
) -> Estimate:
    """Estimate from the lengths of some examples. Raises ConfigError if a prompt is too long.

    Completions are taken to be as long as the true answers, and all different. An untrained model
    hardly ever ends its text, so its completions have --max-new-tokens tokens.
    """
    examples = some_examples(task)
    most = config.sampling.max_new_tokens
    prompt_len = encode_prompts(tokenizer, examples, shape.context - most)[1].float()
    answers = encode_answers(tokenizer, examples)[1].float()
    if not config.supervised:
        answers = answers.clamp(max=most)
        if config.model.init_from == "scratch":
            answers.fill_(most)
    counts = nothing_shared(
        config,
        prompt_len=float(prompt_len.mean()),
        completion_len=float(answers.mean()),
        longest=float(answers.max()),
        world_size=world_size,
    )
    return estimate_step(config, shape, counts, device)


def some_examples(task: Task) -> list[Example]:
    return [task.train(0), *map(task.held_out, range(EXAMPLES_MEASURED))]


# --- with seconds ---------------------------------------------------------------------------------


def step_seconds(
    config: Config, shape: ModelShape, counts: StepCounts, rates: Rates, score: float
) -> dict[str, float]:
    """Seconds of a step by phase; `score` is the seconds that a completion's reward takes."""
    n, layers = counts.micro_batches, shape.layers
    tokens, predictions = counts.packed / n, counts.predictions / n
    forward = layers * rates.block_forward.at(tokens) + rates.head_forward.at(predictions)
    gradient = layers * rates.block_gradient.at(tokens) + rates.head_gradient.at(predictions)
    optimizer = num_parameters(shape) * rates.optimizer
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

    def __init__(self, config: Config, world_size: int = 1, local_rank: int = 0) -> None:
        """Raises ValueError in one line for whatever the run would not start with."""
        self.config = config
        self.device = accel.pick_device(config.speed.device, local_rank)
        check_shares(config, world_size)
        accel.check_compiler(config.speed, self.device)
        accel.grad_scaler(config.speed, self.device)
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
        self.worst = measure_lengths_and_estimate(
            config, self.shape, self.task, self.tokenizer, self.device.type, world_size
        )

    def estimates(self) -> dict[str, Estimate]:
        """Estimates by what they assume; the last one is the most likely."""
        config, worst = self.config, self.worst.counts
        probe = Probe(config, self.shape, self.tokenizer, self.device)
        rates = probe.rates(worst, made_up_completions(worst, self.shape.vocab_size))
        some = some_examples(self.task)
        score = 0.0 if config.supervised else self._score(some, [[x.answer] for x in some])
        seconds = step_seconds(config, self.shape, worst, rates, score)
        found = {"nothing shared": replace(self.worst, seconds=seconds)}
        if number := self._prompts_to_sample(rates):
            examples = [self.task.train(i) for i in range(number)]
            completions, counts = self._sample(examples)
            score = self._score(examples, decode(self.tokenizer, completions))
            sampled = estimate_step(config, self.shape, counts, self.device.type)
            rates = probe.rates(counts, completions)
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
            params=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p),
            batch_size=config.memory.rollout_batch_size,
        )
        completions = Completions.join(list(parts))
        return completions, as_sampled(self.worst.counts, config, completions, sampler.work)


# --- beside what was measured ---------------------------------------------------------------------


class MeasuredSteps:
    """Sums of what steps actually took, to compare with the estimate."""

    NAMES = ("tokens/run", "rollout/tokens", "rollout/rounds", "step_time", "memory/peak_mib")

    def __init__(self) -> None:
        self.steps, self.sums = 0, dict.fromkeys(self.NAMES, 0.0)

    def add(self, values: Mapping[str, float]) -> None:
        self.steps += 1
        for name in self.NAMES[:-1]:
            self.sums[name] += values.get(name, 0.0)
        self.sums["memory/peak_mib"] = values["memory/peak_mib"]  # the largest so far

    def means(self) -> dict[str, float]:
        """Means per step, except for the peak memory, which is the run's."""
        peak = "memory/peak_mib"
        steps = max(1, self.steps)
        return {name: x if name == peak else x / steps for name, x in self.sums.items()}

    def beside(self, estimate: Estimate, device: str, world_size: int) -> list[list[str]]:
        """Three columns for a table: what, estimated, measured."""
        means, tokens = self.means(), estimate.tokens
        for name in ("tokens/run", "rollout/tokens"):  # counted over all processes
            means[name] /= world_size
        rows = [["tokens: update", f"{tokens['update']:,.0f}", f"{means['tokens/run']:,.0f}"]]
        if "rollout" in tokens:
            ran = f"{means['rollout/tokens']:,.0f}"
            rows.append(["tokens: rollout", f"{tokens['rollout']:,.0f}", ran])
            rows.append(["rounds of decoding", "", f"{means['rollout/rounds']:,.1f}"])
        of_what = "allocated" if device == "cuda" else "measured with the program itself"
        peak = f"{means['memory/peak_mib']:,.0f}"
        rows.append([f"peak MiB ({of_what})", f"{estimate.peak_mib:,.0f}", peak])
        return [*rows, ["seconds", "", f"{means['step_time']:.2f}"]]

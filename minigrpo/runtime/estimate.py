"""Estimate a step before it is run: tokens, FLOPs, memory by kind.

step_counts.py counts what a step runs; flops.py and step_memory.py turn counts into FLOPs and
bytes. Every run compares the estimate with what it measured, in a table at its end. planner.py adds
seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..config import Config
from ..model.encoding import encode_answers, encode_pairs, encode_prompts
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer
from ..types import Completions, Example, Task
from .flags import ConfigError
from .flops import step_flops
from .step_counts import StepCounts, as_sampled, nothing_shared
from .step_memory import MIB, StepMemory
from .student import student_shape

EXAMPLES_MEASURED = 64  # to find the mean lengths of prompts and answers
ASSUMED_PROMPT = 256  # tokens, where there are no data to measure


@dataclass(frozen=True)
class Estimate:
    """One process's share of a step."""

    parameters: int
    trained: int  # of them
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
            "trained parameters": f"{self.trained / 1e6:,.2f} M",
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
    """Everything but seconds; `device` is a type, such as cuda.

    Raises ConfigError for a --student that is not found.
    """
    memory = StepMemory(config, shape, counts, device, student_shape(config))
    by_kind = memory.by_kind()
    tokens = counts.tokens
    if config.optimizer.num_iterations > 1:
        tokens["old log-probs"] = counts.packed
        tokens["update"] *= config.optimizer.num_iterations
    if config.loss.kl_coef:
        tokens["reference"] = counts.packed
    return Estimate(
        parameters=memory.weights.num_parameters,
        trained=memory.weights.num_trained,
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
    tokenizer: Tokenizer,
    device: str,
    world_size: int,
) -> Estimate:
    """Estimate from the lengths of some examples. Raises ConfigError if a prompt is too long.

    Completions are taken to be all different, and as long as the true answers. Where these say
    nothing about the length, they have --max-new-tokens tokens: an untrained model hardly ever ends
    its text, and where users' code scores, the answer may be the last number of a long text.
    """
    examples = some_examples(task)
    most = config.sampling.max_new_tokens
    own_scores = config.task.rewards or config.task.name.endswith(".py")
    own_scores = own_scores or not any(example.answer for example in examples)
    prompt_len = encode_prompts(tokenizer, examples, shape.context - most)[1].float()
    answers = encode_answers(tokenizer, examples)[1].float()
    if not config.supervised:
        answers = answers.clamp(max=most)
        if config.model.init_from == "scratch" or own_scores:
            answers.fill_(most)
    counts = nothing_shared(
        config,
        prompt_len=float(prompt_len.mean()),
        completion_len=float(answers.mean()),
        longest=float(answers.max()),
        world_size=world_size,
    )
    if config.supervised:  # what the step runs is known, padding included
        counts = as_sampled(counts, config, true_answers(examples, tokenizer, counts, shape))
    return estimate_step(config, shape, counts, device)


def assume_lengths_and_estimate(
    config: Config, shape: ModelShape, device: str, world_size: int
) -> Estimate:
    """Estimate without data: prompts of ASSUMED_PROMPT tokens, the longest completions."""
    most = config.sampling.max_new_tokens
    if most + ASSUMED_PROMPT > shape.context:
        raise ConfigError(
            f"--max-new-tokens {most} leaves less than {ASSUMED_PROMPT} tokens for a prompt in the "
            f"model's context of {shape.context}"
        )
    counts = nothing_shared(
        config, prompt_len=ASSUMED_PROMPT, completion_len=most, longest=most, world_size=world_size
    )
    return estimate_step(config, shape, counts, device)


def some_examples(task: Task) -> list[Example]:
    return [task.train(0), *map(task.held_out, range(EXAMPLES_MEASURED))]


def true_answers(
    examples: Sequence[Example], tokenizer: Tokenizer, counts: StepCounts, shape: ModelShape
) -> Completions:
    """The batch of a supervised step, or a part of it. Raises ConfigError if one does not fit."""
    return encode_pairs(tokenizer, examples[: counts.prompts], shape.context)


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

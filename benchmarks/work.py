"""The job that a benchmark measures: a model, prompts with rewards, and sizes.

It is made up by default: random text and random weights, every completion of the maximum length.
With --natural or --config it is a real job with its own model, prompts, lengths and rewards.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers
import torch
import tyro
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from minigrpo.config import Config, read_toml
from minigrpo.learner import Learner
from minigrpo.model.tokenizer import Tokenizer
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.parts import Given, Parts
from minigrpo.resolve import resolve
from minigrpo.rewards import similarity
from minigrpo.rollout import RolloutBatches
from minigrpo.run.console import Console
from minigrpo.runtime.device import PhaseTimer, pick_device, set_up_process
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.prefetch import ExamplePrefetcher
from minigrpo.runtime.rng import stream
from minigrpo.sampling.sampler import Sampler
from minigrpo.task import Task
from minigrpo.turns.environments import EnvironmentSet
from minigrpo.types import Example, RolloutBatch

from .measure import Outputs, PeakMemory

FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are


class Preset(NamedTuple):
    """A made-up job."""

    shape: Mapping[str, Any]  # of a `ModelShape`, without the context
    prompt_len: int
    settings: Mapping[str, float]  # of a `Config`


TINY = {"vocab_size": 512, "layers": 4, "width": 128, "heads": 4}
QWEN_494M = {"family": "qwen2", "vocab_size": 151936, "layers": 24, "width": 896, "heads": 14}
QWEN_494M |= {"kv_heads": 2, "mlp_width": 4864, "norm_eps": 1e-6, "rope_theta": 1e6}
EIGHT_BY_EIGHT = {"prompts_per_step": 8, "group_size": 8, "kl_coef": 0.04}
TWO_BY_FOUR = {"prompts_per_step": 2, "group_size": 4, "kl_coef": 0.04}
PRESETS = {
    "tiny": Preset(TINY, 80, {**EIGHT_BY_EIGHT, "max_new_tokens": 80}),
    # of the peers benchmark alone: grpo.py's cache knows no grouped queries
    "qwen2.5-0.5b": Preset(QWEN_494M, 128, {**TWO_BY_FOUR, "max_new_tokens": 64}),
}


class RandomText(Task):
    """Random prompts and answers of given lengths, one token per character."""

    parts: Mapping[str, float] = {"similarity": 1.0}

    def __init__(self, seed: int, prompt_len: int, answer_len: int) -> None:
        self.seed = seed
        self.prompt_len = prompt_len
        self.answer_len = answer_len

    def train(self, number: int) -> Example:
        rng = stream(self.seed, "random text", number)
        letters = rng.integers(33, 127, self.prompt_len + self.answer_len, dtype=np.uint8)
        text = letters.tobytes().decode()
        return Example(text[: self.prompt_len], text[self.prompt_len :], index=number)

    def held_out(self, number: int) -> Example:
        return self.train(2**40 + number)  # never trained on

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {"similarity": similarity(text, example.answer)}


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per byte; the others only make the output head as large as asked for."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"filler{i}" for i in range(len(names), vocab_size - 1)]
    end = vocab_size - 1
    vocabulary = {name: i for i, name in enumerate(names)} | {"<|endoftext|>": end}
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    special = {"<|endoftext|>": end}
    return Tokenizer("bytes", Path(), engine, special, (), end, end, frozenset([end]), None)


@dataclass(frozen=True)
class WorkFlags(Outputs):
    """The flags that choose a job."""

    preset: Literal["tiny", "qwen2.5-0.5b"] = "tiny"
    """tiny: 4 layers, width 128, 512 tokens."""
    natural: bool = False
    """The default job with its own model, prompts and rewards; completions end with end of text."""
    config: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Like --natural, with the job of a TOML file or a preset; a later file counts above it."""
    model: str | None = None
    """Another model for the job of --config."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    prompts_per_step: int | None = None
    """Prompts per step."""
    group_size: int | None = None
    """Completions per prompt."""
    max_new_tokens: int | None = None
    """Longest completion in tokens."""

    def sizes(self) -> dict[str, Any]:
        """The sizes that were given."""
        names = ("model", "prompts_per_step", "group_size", "max_new_tokens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Work:
    """One job, the same for every row of a benchmark."""

    config: Config
    model: Transformer  # on the device; every row trains a copy
    tokenizer: Tokenizer
    task: Task
    environments: EnvironmentSet | None
    forced: bool  # no end of text: every completion has max_new_tokens tokens
    device: torch.device

    @classmethod
    def of(cls, flags: WorkFlags) -> "Work":
        return cls._real(flags) if flags.natural or flags.config else cls._made_up(flags)

    @classmethod
    def _real(cls, flags: WorkFlags) -> "Work":
        device = pick_device(flags.device)
        settings = dict[str, Any]()
        for file in flags.config:
            settings |= read_toml(file)
        settings |= {**flags.sizes(), "max_steps": 10**6, "out_dir": ""}
        config = resolve(Config.of(**settings))
        parts = Parts(config, device)
        chosen = parts.model, parts.tokenizer, parts.task, parts.environments
        return cls(config, *chosen, forced=False, device=device)

    @classmethod
    def _made_up(cls, flags: WorkFlags) -> "Work":
        device = pick_device(flags.device)
        preset = PRESETS[flags.preset]
        config = Config.of(**{**preset.settings, **flags.sizes()}, max_steps=10**6)
        max_new_tokens = config.sampling.max_new_tokens
        shape = ModelShape(context=preset.prompt_len + max_new_tokens, **preset.shape)
        model = Transformer(shape, seed=config.run.seed).to(device)
        # answers are longer than completions, so that proposals never run out
        task = RandomText(config.run.seed, preset.prompt_len, max_new_tokens + 32)
        tokenizer = byte_tokenizer(shape.vocab_size)
        return cls(config, model, tokenizer, task, None, forced=True, device=device)

    def describe(self) -> str:
        """The job in one line."""
        sampling = self.config.sampling
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        return (
            f"{parameters:.2f} M parameters, {sampling.prompts_per_step} prompts x "
            f"{sampling.group_size} completions of {sampling.max_new_tokens} tokens"
            f"{'' if self.forced else ' or fewer'}, KL {self.config.loss.kl_coef:g}"
        )


class Strict(Console):
    """A warning ends a row: it must not silently run in smaller pieces."""

    def warn(self, text: str) -> None:
        raise MemoryError(text)


class WorkParts(Parts):
    """The parts of a job with other flags, for a model that is trained itself."""

    def __init__(self, work: Work, config: Config, model: Transformer) -> None:
        super().__init__(config, work.device, Strict(), Given(model=model))
        self.tokenizer = work.tokenizer
        self.task = work.task
        self.environments = work.environments


class Step:
    """The library's training step with the flags of a config, on a copy of the job's model."""

    def __init__(
        self,
        config: Config,
        work: Work,
        sampler: type[Sampler] = Sampler,
        model: Transformer | None = None,
    ) -> None:
        """`model` is trained itself; None: a copy of the job's. --lora-rank adds adapters."""
        self.config = config
        self.device = work.device
        self.timer = PhaseTimer(self.device)
        parts = WorkParts(work, config, copy.deepcopy(work.model) if model is None else model)
        dist = DistContext()
        warn = parts.console.warn
        self.model = parts.model
        self.learner = Learner(
            config, self.model, parts.loss, precision=parts.precision, dist=dist, warn=warn
        )
        stops = frozenset[int]() if work.forced else work.tokenizer.stops
        self.sampler = sampler(
            config,
            self.model,
            replace(work.tokenizer, stops=stops),
            autocast=parts.precision.autocast,
            warn=warn,
            speculate=work.task.speculate,
            dialogues=parts.sampler.dialogues,
        )
        per_step = config.sampling.prompts_per_step
        self.source = RolloutBatches(
            config,
            ExamplePrefetcher(work.task, per_step, dist.share(per_step)),
            self.sampler,
            parts.scorer,
            parts.loss,
            parts.reference,
            parts.teacher,
            dist,
            self.timer,
        )
        self.batch: RolloutBatch

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        set_up_process(self.config.speed, self.device)  # process-wide: set it again
        self.timer.take()
        start = time.perf_counter()
        self.batch = self.source.batch(number)
        with self.timer.phase("update"):
            learnt = self.learner.learn(self.batch, number)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            **self.timer.take(),
            "completion_tokens": float(self.batch.completions.completion_mask.sum()),
            **self.batch.metrics,
            "tokens/run": learnt["tokens/run"],
        }

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss.

        Not the loss itself: at a ratio of 1 the advantages cancel, and only rounding remains.
        """
        set_up_process(self.config.speed, self.device)
        with torch.no_grad():
            pieces = batch.split(self.config.memory.micro_batch_size or len(batch))
            logps = [self.learner.forward(self.learner.pack(piece)).logp for piece in pieces]
            total = sum(float(logp.double().sum()) for logp in logps)
        self.learner.gradient(*self.learner.prepare(batch))
        weights = self.model.parameters()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return -total / int(batch.completions.completion_mask.sum()), gradient


def peak_of(step: Any, device: torch.device, before: int) -> float:
    """MiB at most in a step's second run, with what has been allocated since `before`."""
    step.step(0)
    resident = allocated(device) - before
    # not in a timed step: measuring the peak returns freed memory, which takes time
    with PeakMemory(device) as peak:
        step.step(1)
    return peak.mib + resident / 2**20


def allocated(device: torch.device) -> int:
    """Bytes in use on a CUDA device; 0 elsewhere."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0

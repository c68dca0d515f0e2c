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

from minigrpo.build import FrozenModels, Job, make_scorer, resolve
from minigrpo.config import Config, read_toml
from minigrpo.given import Given
from minigrpo.learner import Learner
from minigrpo.model.packing import pack
from minigrpo.model.shape import AttentionShape, GatedDeltaShape, ModelShape, Rope
from minigrpo.model.source import ModelSource
from minigrpo.model.transformer import Transformer
from minigrpo.rewards.functions import similarity
from minigrpo.rng import stream
from minigrpo.rollout import RolloutBatches
from minigrpo.run.console import Console
from minigrpo.runtime.device import PhaseTimer, pick_device, set_up_process
from minigrpo.runtime.parallel import Parallel
from minigrpo.sampling.sampler import Sampler
from minigrpo.task import Task
from minigrpo.tasks.base import ExamplePrefetcher
from minigrpo.text.tokenizer import Tokenizer
from minigrpo.turns.dialogues import Dialogues
from minigrpo.types import Example, RolloutBatch

from .measure import Outputs, PeakMemory

FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are


class Preset(NamedTuple):
    """A made-up job."""

    shape: Mapping[str, Any]  # fields of `ModelShape`, without the context
    prompt_len: int
    settings: Mapping[str, float]  # settings of `Config`


TINY = {"vocab_size": 512, "layers": (AttentionShape(),) * 4, "width": 128, "heads": 4}
QWEN_494M = {"family": "qwen2", "vocab_size": 151936, "width": 896, "heads": 14, "kv_heads": 2}
QWEN_494M |= {"mlp_width": 4864, "norm_eps": 1e-6, "layers": 24 * (AttentionShape(rope=Rope(1e6)),)}
# A quarter of Qwen3-0.6B and of Qwen3.5-0.8B in width, of the same number of parameters.
QWEN3 = {"family": "qwen3", "vocab_size": 4096, "width": 512, "heads": 8, "kv_heads": 4}
QWEN3 |= {"head_dim": 128, "mlp_width": 1536, "layers": 11 * (AttentionShape(rope=Rope(1e6)),)}
QWEN3_5 = {"family": "qwen3_5_text", "vocab_size": 4096, "width": 512, "heads": 4, "kv_heads": 1}
DELTA = GatedDeltaShape(key_heads=8, value_heads=8)
GATED = AttentionShape(rope=Rope(1e7, fraction=0.25))
QWEN3_5 |= {"head_dim": 256, "mlp_width": 1792, "layers": 2 * (DELTA, DELTA, DELTA, GATED)}
EIGHT_BY_EIGHT = {"prompts_per_step": 8, "group_size": 8, "kl_coef": 0.04}
TWO_BY_FOUR = {"prompts_per_step": 2, "group_size": 4, "kl_coef": 0.04}
PRESETS = {
    "tiny": Preset(TINY, 80, {**EIGHT_BY_EIGHT, "max_new_tokens": 80}),
    # For the peers benchmark alone, because the cache of grpo.py has no grouped queries.
    "qwen3-small": Preset(QWEN3, 256, {**TWO_BY_FOUR, "max_new_tokens": 64}),
    "qwen3.5-small": Preset(QWEN3_5, 256, {**TWO_BY_FOUR, "max_new_tokens": 64}),
    "qwen2.5-0.5b": Preset(QWEN_494M, 128, {**TWO_BY_FOUR, "max_new_tokens": 64}),
    "qwen2.5-0.5b-gpu": Preset(
        QWEN_494M, 256, {**EIGHT_BY_EIGHT, "kl_coef": 0.0, "max_new_tokens": 256}
    ),
}


class RandomText(Task):
    """Random prompts and answers of given lengths, one token per character."""

    reward_weights: Mapping[str, float] = {"similarity": 1.0}

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

    preset: Literal[tuple(PRESETS)] = "tiny"  # type: ignore[valid-type]
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

    job: Job
    model: Transformer  # on the device; every row trains a copy
    forced: bool  # whether completions never end before max_new_tokens
    device: torch.device

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.job.tokenizer

    @property
    def task(self) -> Task:
        return self.job.task

    def with_flags(self, config: Config) -> Job:
        """The same job with other flags."""
        return replace(self.job, config=config)

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
        job = Job.of(config, Given())
        source = ModelSource.of(config.model.name)
        model = source.start(config, job.tokenizer, print, {}).to(device)
        return cls(job, model, forced=False, device=device)

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
        job = Job(config, byte_tokenizer(shape.vocab_size), task, None, ())
        return cls(job, model, forced=True, device=device)

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


class Step:
    """The library's training step with the flags of a config, on a copy of the job's model."""

    def __init__(
        self,
        config: Config,
        work: Work,
        sampler: type[Sampler] = Sampler,
        model: Transformer | None = None,
    ) -> None:
        """Trains `model`, or by default a copy of the job's model. --lora-rank adds adapters."""
        self.config = config
        self.device = work.device
        self.timer = PhaseTimer(self.device)
        job = work.with_flags(config)
        loss = Given().loss_spec(config)
        warn = Strict().warn
        parallel = Parallel(work.device)
        trained = copy.deepcopy(work.model) if model is None else model
        source = ModelSource.of(config.model.name)
        self.model = source.start(config, job.tokenizer, print, {}, trained)
        self.learner = Learner(config, self.model, loss, parallel, warn)
        dialogues = None
        if job.environments is not None:
            dialogues = Dialogues(config, job.environments, job.tokenizer, warn)
        stops = frozenset[int]() if work.forced else job.tokenizer.stops
        self.sampler = sampler(
            config,
            self.model,
            replace(job.tokenizer, stops=stops),
            warn=warn,
            speculate=job.task.speculate,
            dialogues=dialogues,
        )
        frozen_models = FrozenModels(job, self.model, parallel, Strict(), {}, config.model.name)
        per_step = config.sampling.prompts_per_step
        self.batches = RolloutBatches(
            config,
            ExamplePrefetcher(job.task, per_step, parallel.dist.share(per_step)),
            self.sampler,
            make_scorer(job, frozen_models, warn),
            loss,
            frozen_models.of_flag("--reference", config.loss.reference_model),
            frozen_models.of_flag("--teacher", config.loss.teacher),
            parallel.dist,
            self.timer,
        )
        self.batch: RolloutBatch

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        set_up_process(self.config.speed, self.device)  # another row may have changed it
        self.timer.take()
        start = time.perf_counter()
        self.batch = self.batches.batch(number)
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
            packed = pack(batch.completions, self.config.speed.packing)
            batch = replace(batch, packed=packed)
            pieces = batch.split(self.config.memory.micro_batch_size or len(batch))
            logps = [self.learner.forward(piece, "none").logp for piece in pieces]
            total = sum(float(logp.double().sum()) for logp in logps)
        self.learner.gradient(*self.learner.prepare(batch))
        weights = self.model.parameters()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return -total / int(batch.completions.completion_mask.sum()), gradient


def peak_of(step: Any, device: torch.device, before: int) -> float:
    """MiB at most in a step's second run; on CUDA with all that is allocated since `before`."""
    step.step(0)
    resident = allocated(device) - before
    # not in a timed step: measuring the peak returns freed memory, which takes time
    with PeakMemory(device) as peak:
        step.step(1)
    return peak.mib + resident / 2**20


def allocated(device: torch.device) -> int:
    """Bytes in use on a CUDA device; 0 elsewhere."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0

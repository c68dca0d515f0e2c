"""The job that a benchmark measures: a model, prompts with rewards, and sizes.

It is made up by default: random text and random weights, every completion of the maximum length.
With --natural or --config it is a real job with its own model, prompts, lengths and rewards.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
import tyro
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from minigrpo.build import Parts, resolve
from minigrpo.config import Config, read_toml
from minigrpo.learner import Learner
from minigrpo.model.encoding import encode_prompts
from minigrpo.model.tokenizer import Tokenizer
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.rewards import similarity
from minigrpo.rollout import Batches
from minigrpo.run.console import Console
from minigrpo.runtime.device import PhaseTimer, pick_device, set_up_process
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.rng import stream
from minigrpo.sampling.generate import Sampler
from minigrpo.task import Task
from minigrpo.types import Completions, Example, RolloutBatch

from .measure import Outputs

ConfigFiles = tyro.conf.UseAppendAction[tuple[str, ...]]
SIZES = (
    *("layers", "width", "heads", "vocab_size", "prompt_len"),
    *("prompts_per_step", "group_size", "max_new_tokens", "kl_coef", "micro_batch_size"),
)
PRESETS: dict[str, dict[str, float]] = {
    "tiny": dict(zip(SIZES, (4, 128, 4, 512, 80, 8, 8, 80, 0.04, 0), strict=True)),
    # two prompts at a time: with all at once, grpo.py's step would not fit into 24 GB
    "gpt2": dict(zip(SIZES, (12, 768, 12, 50257, 80, 8, 8, 144, 0.04, 2), strict=True)),
    # of the peers benchmark alone: grpo.py's cache knows no grouped queries
    "qwen2.5-0.5b": dict(zip(SIZES, (24, 896, 14, 151936, 128, 2, 4, 64, 0.04, 0), strict=True)),
}
QWEN = {"family": "qwen2", "kv_heads": 2, "mlp_width": 4864, "norm_eps": 1e-6, "rope_theta": 1e6}
FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are
ANSWER_TAIL = 32  # tokens by which made-up answers exceed completions, so proposals never run out
HELD_OUT = 2**40  # made-up examples from this number on are never trained on
LENGTHS_MEASURED = 64  # prompts whose mean length is reported


class RandomText(Task):
    """Random prompts and answers of given lengths, one token per character."""

    parts: Mapping[str, float] = {"similarity": 1.0}

    def __init__(self, seed: int, prompt_len: int, answer_len: int) -> None:
        self.seed, self.prompt_len, self.answer_len = seed, prompt_len, answer_len

    def train(self, number: int) -> Example:
        rng = stream(self.seed, "random text", number)
        letters = rng.integers(33, 127, self.prompt_len + self.answer_len, dtype=np.uint8)
        text = letters.tobytes().decode()
        return Example(text[: self.prompt_len], text[self.prompt_len :], index=number)

    def held_out(self, number: int) -> Example:
        return self.train(HELD_OUT + number)

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
    special, stops = {"<|endoftext|>": end}, frozenset([end])
    return Tokenizer("bytes", Path(), engine, special, (), end, end, stops, None)


@dataclass(frozen=True)
class WorkFlags(Outputs):
    """The flags that choose a job."""

    preset: Literal["tiny", "gpt2", "qwen2.5-0.5b"] = "tiny"
    """tiny: 4 layers, width 128, 512 tokens; gpt2: 124M parameters, 50,257 tokens."""
    natural: bool = False
    """The default job with its own model, prompts and rewards; completions end with end of text."""
    config: ConfigFiles = ()
    """Like --natural, with the job of a TOML file or a preset; a later file counts above it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    prompts_per_step: int | None = None
    """Prompts per step."""
    group_size: int | None = None
    """Completions per prompt."""
    prompt_len: int | None = None
    """Tokens per made-up prompt."""
    max_new_tokens: int | None = None
    """Longest completion in tokens."""
    kl_coef: float | None = None
    """Weight of the KL term; above 0 there is a reference model."""
    micro_batch_size: int | None = None
    """Prompts per forward and backward of the update; 0: all of them."""

    def sizes(self) -> dict[str, Any]:
        """The sizes that were given."""
        return {name: x for name in SIZES if (x := getattr(self, name, None)) is not None}


@dataclass(frozen=True)
class Work:
    """One job, the same for every row of a benchmark."""

    config: Config
    model: Transformer  # on the device; every row trains a copy
    tokenizer: Tokenizer
    task: Task
    forced: bool  # no end of text: every completion has max_new_tokens tokens
    device: torch.device

    @classmethod
    def of(cls, flags: WorkFlags) -> "Work":
        device, sizes = pick_device(flags.device), flags.sizes()
        if flags.natural or flags.config:
            settings = {name: x for file in flags.config for name, x in read_toml(file).items()}
            config = resolve(Config.of(**{**settings, **sizes}, max_steps=10**6, out_dir=""))
            parts = Parts(config, device)
            return cls(config, parts.model, parts.tokenizer, parts.task, False, device)
        sizes = {**PRESETS[flags.preset], **sizes}
        m = {n: int(sizes.pop(n)) for n in ("vocab_size", "layers", "width", "heads")}
        prompt_len = sizes.pop("prompt_len")
        config = Config.of(**sizes, max_steps=10**6)
        variant: dict[str, Any] = QWEN if flags.preset == "qwen2.5-0.5b" else {}
        context = prompt_len + config.sampling.max_new_tokens
        shape = ModelShape(m["vocab_size"], context, m["layers"], m["width"], m["heads"], **variant)
        model = Transformer(shape, seed=config.run.seed).to(device)
        answer_len = config.sampling.max_new_tokens + ANSWER_TAIL
        task = RandomText(config.run.seed, prompt_len, answer_len)
        return cls(config, model, byte_tokenizer(m["vocab_size"]), task, True, device)

    def parts(self, config: Config, model: Transformer) -> Parts:
        """The parts of this job with other flags, for a model that is trained itself."""
        parts = Parts(config, self.device, Strict(), {"model": model})
        parts.tokenizer, parts.task = self.tokenizer, self.task
        return parts

    def describe(self) -> str:
        """The job in one line."""
        some = [self.task.train(i) for i in range(LENGTHS_MEASURED)]
        lengths = encode_prompts(self.tokenizer, some, self.model.shape.context)[1]
        sampling, shape = self.config.sampling, self.model.shape
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        return (
            f"{parameters:.2f} M parameters ({shape.layers} layers, width {shape.width}, "
            f"{shape.vocab_size} tokens), {sampling.prompts_per_step} prompts of "
            f"{float(lengths.float().mean()):.0f} tokens x {sampling.group_size} completions of "
            f"{sampling.max_new_tokens}, {'forced length' if self.forced else 'until end of text'}"
            f"; KL {self.config.loss.kl_coef:g}"
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
        """`model` is trained itself; None: a copy of the job's. --lora-rank adds adapters."""
        self.config, self.device = config, work.device
        parts = work.parts(config, copy.deepcopy(work.model) if model is None else model)
        self.model, warn = parts.model, parts.console.warn
        self.learner = Learner(config, self.model, DistContext(), warn, parts.loss)
        parts.autocast = low = self.learner.autocast
        self.sampler = sampler(config, self.model, work.tokenizer, low, warn, work.task)
        if work.forced:
            self.sampler.stops = frozenset()  # no token ends a completion
        parts.sampler, self.timer = self.sampler, PhaseTimer(self.device)
        self.source = Batches(parts, self.timer, DistContext(), {})
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
        lengths = self.batch.completions.completion_mask.sum(-1)
        return {
            "seconds": seconds,
            **self.timer.take(),
            "completion_tokens": float(lengths.sum()),
            **self.batch.metrics,
            "tokens/run": learnt["tokens/run"],
        }

    def tokens(self) -> Tensor:
        """What the last step sampled, `[P * G, S]`; -1 beyond the end."""
        return pad_tokens(self.batch.completions, self.config.sampling.max_new_tokens)

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss.

        Not the loss itself: at a ratio of 1 the advantages cancel, and only rounding remains.
        """
        set_up_process(self.config.speed, self.device)
        with torch.no_grad():
            parts = batch.split(self.config.memory.micro_batch_size or len(batch))
            logps = [self.learner.forward(self.learner.pack(part))[0] for part in parts]
            total = sum(float(logp.double().sum()) for logp in logps)
        self.learner.gradient(*self.learner.prepare(batch))
        gradient = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.model.parameters()
        ]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return -total / int(batch.completions.completion_mask.sum()), gradient


def pad_tokens(completions: Completions, length: int) -> Tensor:
    """`[P * G, length]` sampled tokens, -1 beyond the end, so that two steps can be compared."""
    mask = completions.completion_mask
    ids = torch.where(mask, completions.completion_ids, -1).flatten(0, 1)
    return torch.nn.functional.pad(ids, (0, length - ids.shape[1]), value=-1)

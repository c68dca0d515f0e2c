"""The work that a benchmark measures, and a training step put together from chosen parts."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tiktoken
import torch
from torch import Tensor

from minigrpo.config import Config
from minigrpo.learner import Learner
from minigrpo.model.encoding import encode_prompts
from minigrpo.model.packing import PACKINGS
from minigrpo.model.pretrained import build_model
from minigrpo.model.tokenizer import END_OF_TEXT, load_tokenizer
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.reference import FrozenReference, NoReference, Reference
from minigrpo.rewards import RewardScorer, similarities, similarity
from minigrpo.rollout import ExamplePrefetcher, RolloutBatches, Sampler
from minigrpo.runtime import accel
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.flags import ConfigError, flag
from minigrpo.runtime.logging import PhaseTimer
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.runtime.rng import stream
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.registry import load_task
from minigrpo.types import Example, RolloutBatch, Task

from .naive import FullLogits, FullLogitsReference, OneAtATime, OneByOne
from .rewards import naive

T = TypeVar("T")
OF_THE_MODEL = (
    "layers",
    "width",
    "heads",
    "vocab_size",
    "prompt_len",
)  # a job with a model and prompts of its own has these
OF_THE_STEP = ("prompts_per_step", "group_size", "max_new_tokens", "kl_coef", "micro_batch_size")
SIZES = OF_THE_MODEL + OF_THE_STEP
PRESETS: dict[str, dict[str, float]] = {
    "tiny": dict(zip(SIZES, (4, 128, 4, 512, 80, 8, 8, 80, 0.04, 0), strict=True)),
    # two prompts at a time: all at once, the naive step would not go into 24 GB
    "gpt2": dict(zip(SIZES, (12, 768, 12, 50257, 80, 8, 8, 144, 0.04, 2), strict=True)),
}
BEYOND_THE_END = 32  # tokens of a made-up answer that no completion reaches, so that no draft ends


class RandomText:
    """Prompts and answers without sense, of given lengths: forced work. Drafts are of no use
    here."""

    parts: Mapping[str, float] = {"similarity": 1.0}

    def __init__(self, seed: int, prompt_len: int, answer_len: int) -> None:
        self.seed, self.lengths = seed, (prompt_len, answer_len)

    def train(self, number: int) -> Example:
        prompt_len, answer_len = self.lengths
        letters = stream(self.seed, "random text", number).integers(
            33, 127, prompt_len + answer_len, dtype=np.uint8
        )
        text = letters.tobytes().decode()
        return Example(text[:prompt_len], text[prompt_len:], index=number)

    def held_out(self, number: int) -> Example:
        return self.train(-1 - number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        return {"similarity": similarities(texts, [example.answer for example in examples])}

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {"similarity": similarity(text, example.answer)}


def bytes_and_more(vocab_size: int) -> tiktoken.Encoding:
    """A tokenizer of any size that gives a token a byte; the rest only makes the head as large as
    asked for.
    """
    if vocab_size < 257:
        raise ConfigError(f"--vocab-size must be at least 257, got {vocab_size}")
    texts = itertools.chain.from_iterable(
        map(bytes, itertools.product(range(256), repeat=n)) for n in (1, 2, 3)
    )
    ranks = {text: rank for rank, text in enumerate(itertools.islice(texts, vocab_size - 1))}
    return tiktoken.Encoding(
        "bytes",
        pat_str="(?s:.)",
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: vocab_size - 1},
    )


@dataclass(frozen=True)
class WorkloadFlags:
    """What a benchmark's flags say about its work."""

    preset: Literal["tiny", "gpt2"] = "tiny"
    """tiny: 4 layers, width 128, 512 tokens; gpt2: 124M parameters, 50,257 tokens. WorkloadFlags below
    override it.
    """
    natural: bool = False
    """The default job itself: its model, prompts and rewards, end of text on, nothing forced."""
    config: Path | None = None
    """The same with the job of a TOML file."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    layers: int | None = None
    """Blocks."""
    width: int | None = None
    """Size of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    vocab_size: int | None = None
    """Tokens that there are."""
    prompts_per_step: int | None = None
    """Prompts of a step."""
    group_size: int | None = None
    """Completions of each."""
    prompt_len: int | None = None
    """Tokens of a prompt, where they are made up."""
    max_new_tokens: int | None = None
    """Longest completion."""
    forced_length: bool | None = None
    """No end of text: every completion as long as that. Default: yes, but with --natural and
    --config.
    """
    kl_coef: float | None = None
    """Above 0: with a frozen reference."""
    micro_batch_size: int | None = None
    """Prompts of an update that go through the model at a time; 0: all."""


@dataclass(frozen=True)
class Workload:
    """One job: a model, prompts, and how long completions are."""

    config: Config
    model: Transformer  # on the device; each machine gets a copy
    tokenizer: tiktoken.Encoding
    task: Task
    forced: bool  # no end of text
    natural: bool
    prompt_len: float  # tokens, mean
    device: torch.device

    @classmethod
    def of(cls, asked: WorkloadFlags, device: torch.device) -> "Workload":
        """Raises ConfigError (ValueError for a file) in one line."""
        given = {name: value for name in SIZES if (value := getattr(asked, name, None)) is not None}
        natural = asked.natural or asked.config is not None
        if natural:
            if wrong := [flag(name) for name in OF_THE_MODEL if name in given]:
                raise ConfigError(
                    f"{wrong[0]} goes with made-up work: a job has a model and prompts of its own"
                )
            base = Config.from_toml(asked.config) if asked.config else Config.of()
            config = base.replace(**given, max_steps=10**6)
            if config.sampling.top_k or config.sampling.top_p < 1 or config.task.rewards:
                raise ConfigError(
                    f"--config {asked.config}: --top-k, --top-p and --rewards are not for a naive "
                    "step"
                )
            if config.supervised:
                raise ConfigError(
                    f"--config {asked.config}: --loss {config.loss.name} samples nothing"
                )
            tokenizer = load_tokenizer(config.model.tokenizer)
            task = load_task(
                config.task.name,
                seed=config.run.seed,
                history=config.task.history,
                data=config.task.data,
            )
            model = build_model(config, tokenizer)
        else:
            sizes: dict[str, Any] = {**PRESETS[asked.preset], **given}
            if (
                "micro_batch_size" not in given
            ):  # the preset's, as far as that divides the prompts asked for
                sizes["micro_batch_size"] = math.gcd(
                    sizes["micro_batch_size"], sizes["prompts_per_step"]
                )
            vocab_size, prompt_len = sizes.pop("vocab_size"), sizes.pop("prompt_len")
            context = prompt_len + sizes["max_new_tokens"]
            config = Config.of(**sizes, context=context, init_from="scratch", max_steps=10**6)
            tokenizer = bytes_and_more(vocab_size)
            task = RandomText(
                config.run.seed, prompt_len, config.sampling.max_new_tokens + BEYOND_THE_END
            )
            model = Transformer(
                ModelShape(
                    vocab_size, context, config.model.layers, config.model.width, config.model.heads
                ),
                seed=config.run.seed,
            )
        lengths = encode_prompts(
            tokenizer, [task.train(i) for i in range(64)], model.shape.context
        )[1]
        forced = asked.forced_length if asked.forced_length is not None else not natural
        return cls(
            config,
            model.to(device),
            tokenizer,
            task,
            forced,
            natural,
            float(lengths.float().mean()),
            device,
        )

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def describe(self, group_size: str = "") -> str:
        """In words; `group_size` if there are several."""
        c, s, at_a_time = self.config.sampling, self.shape, self.config.memory.micro_batch_size
        ends = "all as long as that" if self.forced else "or to their end"
        return (
            f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.2f} M parameters ({s.layers} "
            f"layers, width {s.width}, "
            f"{s.heads} heads, {s.vocab_size} tokens), {c.prompts_per_step} prompts of "
            f"{self.prompt_len:.0f} tokens x "
            f"{group_size or c.group_size} completions of {c.max_new_tokens}, {ends}; KL "
            f"{self.config.loss.kl_coef}"
            + (f"; updates of {at_a_time} prompts at a time" if at_a_time else "")
        )

    def to_dict(self) -> dict[str, Any]:
        sizes = vars(self.shape) | {name: self.config.flat()[name] for name in OF_THE_STEP}
        ends = {
            "prompt_len": self.prompt_len,
            "forced_length": self.forced,
            "natural": self.natural,
        }
        return {**sizes, **ends, "text": self.describe()}


class NoBackoff(OOMBackoff):
    """Does not try with less when memory runs out: a row must be what it says."""

    def run(
        self,
        function: Callable[[int], T],
        there_are: int,
        forget: Callable[[], object] = lambda: None,
    ) -> T:
        return function(self.of(there_are))


class BenchStep:
    """A training step with some of its parts naive (`sampler`, `head`, `rewards`) and the flags of
    a config.
    """

    def __init__(
        self,
        config: Config,
        work: Workload,
        naive_parts: frozenset[str] = frozenset(),
        sampler: type[Sampler] = Sampler,
    ) -> None:
        self.config, self.device = config, work.device
        self.model = copy.deepcopy(work.model)
        accel.chunk_logprobs(config, self.model)
        self.learner = (FullLogits if "head" in naive_parts else Learner)(config, self.model)
        self.sampler = (OneAtATime if "sampler" in naive_parts else sampler)(
            config, self.model, work.tokenizer, self.learner.autocast
        )
        self.learner.backoff = NoBackoff("update", "", config.memory.micro_batch_size)
        self.sampler.backoffs.default_factory = lambda: NoBackoff("sampling", "", 0)
        if work.forced:
            self.sampler.eos = -1
        kind = OneByOne if "rewards" in naive_parts else RewardScorer
        self.scorer = kind(
            work.task,
            weights=config.task.weights(),
            workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
            timeout_s=config.task.reward_timeout,
        )
        if isinstance(self.scorer, OneByOne):
            self.scorer.judge = naive if isinstance(work.task, ChessEnv) else work.task.score
        reference: Reference = NoReference()
        if config.loss.kl_coef and "head" in naive_parts:
            reference = FullLogitsReference(copy.deepcopy(self.model), config.sampling.temperature)
        elif config.loss.kl_coef:
            reference = FrozenReference(
                accel.low_precision_copy(config, self.model),
                packing=PACKINGS[config.speed.packing],
                temperature=config.sampling.temperature,
                backoff=self.learner.backoff,
                autocast=self.learner.autocast,
                offload=config.memory.offload_reference,
            )
        accel.checkpoint_blocks(config, self.model)
        accel.compile_blocks(config, self.model)
        self.timer = PhaseTimer(self.device)
        dist = DistContext()
        examples = ExamplePrefetcher(work.task, config, dist, 0)
        self.source = RolloutBatches(
            config, examples, self.sampler, self.scorer, reference, self.timer, dist
        )
        self.batch: RolloutBatch

    def step(self, number: int) -> dict[str, float]:
        """One training step; seconds of it and of its phases, and how much work it was."""
        accel.use_tf32(self.config)  # process-wide, so every machine says what it wants
        self.timer.take()
        start = time.perf_counter()
        self.batch = self.source.batch(number)
        with self.timer.phase("update"):
            learnt = self.learner.learn(self.batch, number)
        seconds = time.perf_counter() - start
        lengths = self.batch.completions.completion_mask.sum(-1)
        size = {
            "completions": float(lengths.numel()),
            "completion_len": float(lengths.float().mean()),
        }
        return {
            "seconds": seconds,
            **self.timer.take(),
            **size,
            **self.batch.metrics,
            "tokens/run": learnt["tokens/run"],
        }

    def tokens(self) -> Tensor:
        """`[P * G, S]`, what was sampled in the last step; -1 beyond the end."""
        c = self.batch.completions
        ids = torch.where(c.completion_mask, c.completion_ids, -1).flatten(0, 1)
        return torch.nn.functional.pad(
            ids, (0, self.config.sampling.max_new_tokens - ids.shape[1]), value=-1
        )

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the policy loss, as
        this machine sees them.

        Not the policy loss itself: at a ratio of 1 its advantages cancel, and it is 0 but for
        rounding.
        """
        accel.use_tf32(self.config)
        with torch.no_grad():
            parts = batch.split(self.config.memory.micro_batch_size or len(batch))
            total = sum(
                float(self.learner.forward(part.completions)[0].double().sum()) for part in parts
            )
        nll = -total / int(batch.completions.completion_mask.sum())
        batch, counts = self.learner.prepare(batch)
        self.learner.gradient(batch, counts)
        gradient = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.model.parameters()
        ]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return nll, gradient

"""The job that a benchmark measures: a model, prompts with rewards, and sizes.

It is made up by default: random text and random weights, every completion of the maximum length.
With --natural or --config it is a real job with its own model, prompts, lengths and rewards.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from minigrpo.config import Config
from minigrpo.model.encoding import encode_prompts
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import Tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.model.vocabulary import END_OF_TEXT, Vocabulary
from minigrpo.model.weights import export_model
from minigrpo.rewards import similarities
from minigrpo.runtime.build import make_model, make_task, make_tokenizer
from minigrpo.runtime.constraints import AtLeast, AtMost
from minigrpo.runtime.flags import ConfigError, flag
from minigrpo.runtime.rng import stream
from minigrpo.runtime.settings import read_settings
from minigrpo.tasks.scoring import BatchScored
from minigrpo.types import Example, Task

from .flags import BenchmarkFlags

ConfigFiles = tyro.conf.UseAppendAction[tuple[str, ...]]
# a natural job brings its own model and prompts, so it takes none of these
MODEL_SIZES = ("layers", "width", "heads", "vocab_size", "prompt_len")
STEP_SIZES = ("prompts_per_step", "group_size", "max_new_tokens", "kl_coef", "micro_batch_size")
SIZES = MODEL_SIZES + STEP_SIZES
QWEN = "qwen2.5-0.5b"
PRESETS: dict[str, dict[str, float]] = {
    "tiny": dict(zip(SIZES, (4, 128, 4, 512, 80, 8, 8, 80, 0.04, 0), strict=True)),
    # two prompts at a time: with all at once, grpo.py's step would not fit into 24 GB
    "gpt2": dict(zip(SIZES, (12, 768, 12, 50257, 80, 8, 8, 144, 0.04, 2), strict=True)),
    # of the peers benchmark alone: grpo.py's cache knows no grouped queries
    QWEN: dict(zip(SIZES, (24, 896, 14, 151936, 128, 2, 4, 64, 0.04, 0), strict=True)),
}
# what else the shape of a preset says
VARIANTS: dict[str, dict[str, Any]] = {
    QWEN: {
        "family": "qwen2",
        "kv_heads": 2,
        "mlp_width": 4864,
        "norm": "rms",
        "norm_eps": 1e-6,
        "projections": "separate",
        "mlp": "swiglu",
        "out_bias": False,
        "mlp_bias": False,
        "rope_theta": 1e6,
    }
}
# settings that are fixed in grpo.py: with another value its row would be a different job
FIXED_BY_GRPO_PY = (
    "loss",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "dynamic_sampling",
    "rewards",
    "reward_weights",
    "clip_low",
    "clip_high",
    "ratio_cap",
    "advantage",
    "scale",
    "kl",
    "overlong",
    "sampler_correction",
    "shuffle_rewards",
    "num_iterations",
)
ANSWER_TAIL = 32  # tokens by which made-up answers exceed completions, so proposals never run out
HELD_OUT = 2**40  # made-up examples from this number on are never trained on
LENGTHS_MEASURED = 64  # prompts whose mean length is reported


class RandomText(BatchScored):
    """A task of random prompts and answers of given lengths, one token per character."""

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

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        return {"similarity": similarities(texts, [example.answer for example in examples])}


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of a given size with one token per byte.

    Its longer tokens never occur; they only make the output head as large as asked for. There are
    at least the 256 bytes and end of text.
    """
    by_length = (map(bytes, itertools.product(range(256), repeat=n)) for n in (1, 2, 3))
    tokens = itertools.islice(itertools.chain.from_iterable(by_length), vocab_size - 1)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocabulary = Vocabulary("(?s:.)", ranks, special={END_OF_TEXT: vocab_size - 1})
    return Tokenizer("bytes", vocabulary, eot=vocab_size - 1)


def read_config(files: Sequence[str]) -> Config:
    """The config of TOML files or presets; later ones override earlier ones. Raises ConfigError."""
    settings = {name: x for path in files for name, x in read_settings(Config, path).items()}
    try:
        return Config.of(**settings).resolved(settings)
    except ConfigError as error:
        raise ConfigError(f"--config {', '.join(files)}: {error}") from None


@dataclass(frozen=True)
class WorkloadFlags(BenchmarkFlags):
    """The flags that choose a workload."""

    preset: Literal["tiny", "gpt2"] = "tiny"
    """tiny: 4 layers, width 128, 512 tokens; gpt2: 124M parameters, 50,257 tokens. The sizes below
    override it.
    """
    natural: bool = False
    """The default job with its own model, prompts and rewards; completions end with end of text."""
    config: ConfigFiles = ()
    """Like --natural, with the job of a TOML file or a preset, and a row with its own flags. May be
    repeated: later files override earlier ones.
    """
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    layers: int | None = None
    """Blocks of the model."""
    width: int | None = None
    """Size of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    vocab_size: Annotated[int | None, AtLeast(257), AtMost(10**6)] = None
    """Tokens in the vocabulary."""
    prompts_per_step: int | None = None
    """Prompts per step."""
    group_size: int | None = None
    """Completions per prompt."""
    prompt_len: Annotated[int | None, AtLeast(1)] = None
    """Tokens per prompt."""
    max_new_tokens: int | None = None
    """Longest completion in tokens."""
    forced_length: bool | None = None
    """Every completion has --max-new-tokens tokens. Default: only for made-up work."""
    kl_coef: float | None = None
    """Weight of the KL term; above 0 there is a reference model."""
    micro_batch_size: int | None = None
    """Prompts per forward and backward of the update; 0: all of them."""

    def sizes(self) -> dict[str, Any]:
        """The sizes that were given."""
        return {name: x for name in SIZES if (x := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Workload:
    """One job, the same for every row of a benchmark."""

    config: Config
    model: Transformer  # on the device; every row trains a copy
    tokenizer: Tokenizer
    task: Task
    forced: bool  # no end of text: every completion has max_new_tokens tokens
    natural: bool
    prompt_len: float  # tokens, mean
    device: torch.device

    @classmethod
    def of(cls, flags: WorkloadFlags, device: torch.device) -> "Workload":
        """Raises ConfigError (ValueError for a file) in one line."""
        natural = flags.natural or bool(flags.config)
        config, model, tokenizer, task = _natural_job(flags) if natural else _made_up_job(flags)
        some = [task.train(i) for i in range(LENGTHS_MEASURED)]
        lengths = encode_prompts(tokenizer, some, model.shape.context)[1]
        forced = flags.forced_length if flags.forced_length is not None else not natural
        return cls(
            config=config,
            model=model.to(device),
            tokenizer=tokenizer,
            task=task,
            forced=forced,
            natural=natural,
            prompt_len=float(lengths.float().mean()),
            device=device,
        )

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def save_model(self, folder: Path) -> None:
        """Write the model as this library and transformers read it."""
        state = self.model.state_dict()
        export_model(state, folder, shape=self.shape, eos=self.tokenizer.eot)

    def describe(self, group_size: str = "") -> str:
        """A description in one line; `group_size` replaces the config's, if there are several."""
        sampling, shape = self.config.sampling, self.shape
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        ends = "forced length" if self.forced else "until end of text"
        text = (
            f"{parameters:.2f} M parameters ({shape.layers} layers, width {shape.width}, "
            f"{shape.heads} heads, {shape.vocab_size} tokens), {sampling.prompts_per_step} prompts "
            f"of {self.prompt_len:.0f} tokens x {group_size or sampling.group_size} completions of "
            f"{sampling.max_new_tokens}, {ends}; KL {self.config.loss.kl_coef}"
        )
        micro = self.config.memory.micro_batch_size
        return text + (f"; micro-batches of {micro} prompts" if micro else "")

    def to_dict(self) -> dict[str, Any]:
        flat = self.config.flat()
        return {
            **vars(self.shape),
            **{name: flat[name] for name in STEP_SIZES},
            "prompt_len": self.prompt_len,
            "forced_length": self.forced,
            "natural": self.natural,
            "text": self.describe(),
        }


Job = tuple[Config, Transformer, Tokenizer, Task]


def _natural_job(flags: WorkloadFlags) -> Job:
    sizes = flags.sizes()
    if wrong := [name for name in MODEL_SIZES if name in sizes]:
        raise ConfigError(
            f"{flag(wrong[0])} goes with made-up work: --natural and --config have their own model "
            "and prompts"
        )
    base = read_config(flags.config)
    config = base.replace(**sizes, max_steps=10**6)
    given, default = config.flat(), Config().flat()
    for name in FIXED_BY_GRPO_PY:
        if given[name] != default[name]:
            raise ConfigError(
                f"--config {', '.join(flags.config)}: {flag(name)} must be "
                f"{default[name] or 'unset'}, because grpo.py has no other, got {given[name]}"
            )
    tokenizer = make_tokenizer(config)
    return config, make_model(config, tokenizer), tokenizer, make_task(config)


def _made_up_job(flags: WorkloadFlags) -> Job:
    given = flags.sizes()
    sizes: dict[str, Any] = {**PRESETS[flags.preset], **given}
    if sizes["micro_batch_size"] and "micro_batch_size" not in given:
        # the preset's may not divide the given number of prompts
        sizes["micro_batch_size"] = math.gcd(sizes["micro_batch_size"], sizes["prompts_per_step"])
    vocab_size, prompt_len = sizes.pop("vocab_size"), sizes.pop("prompt_len")
    context = prompt_len + sizes["max_new_tokens"]
    config = Config.of(**sizes, context=context, init_from="scratch", max_steps=10**6)
    seed, m = config.run.seed, config.model
    variant = VARIANTS.get(flags.preset, {})
    shape = ModelShape(vocab_size, context, m.layers, m.width, m.heads, **variant)
    model = Transformer(shape, seed=seed)
    task = RandomText(seed, prompt_len, sizes["max_new_tokens"] + ANSWER_TAIL)
    return config, model, byte_tokenizer(vocab_size), task

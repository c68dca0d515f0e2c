"""The one Config: every number a run depends on, flat, validated before anything is built.

Precedence: the defaults below, then `--config FILE.toml`, then the command line. The docstring
under a field is its --help. What is not flat is not here: derived numbers are properties, and
nothing else in the library reads the command line.
"""

import argparse
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from .losses import KL_ESTIMATORS, KL_IN_REWARD, LOSSES
from .runtime.flags import ConfigError, did_you_mean, exit_with, flag, parse

AT_LEAST = {
    0: "history eval_every stop_after seed warmup_steps micro_batch_size rollout_batch_size kl_coef weight_decay "
    "clip_low clip_high top_k resample_dead_groups",
    1: "prompts_per_step group_size max_new_tokens max_steps keep_last num_iterations layers width heads context "
    "num_reward_workers eval_size eval_size_during save_every draft_window overlong_buffer",
}
ABOVE_ZERO = "pg_timeout temperature learning_rate grad_clip ratio_cap top_p reward_timeout sampler_correction_cap"
PROFILED = 4, 6  # first and last step that --profile traces
ALWAYS = {
    "layout": "tree",
    "kv_cache": True,
    "draft_answers": True,
    "fused_optimizer": True,
    "skip_dead_groups": True,
}
LOW = {"use_amp": True, "low_precision_weights": True}
FAST: dict[str, dict[str, Any]] = {  # on CPU as measured, on CUDA as reasoned (not measured yet)
    "cpu": ALWAYS,
    "cpu with bfloat16": {**ALWAYS, **LOW},
    "cuda": {**ALWAYS, **LOW, "use_tf32": True, "compile_model": True},
}
UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True, kw_only=True)
class Config:
    # --- the work ---
    task: str = "chess-env"
    """What is asked and how answers are judged: chess-env, policy, chess-env+policy, or a Python
    file (FILE.py).
    """
    data: str = ""
    """Instead of self-play: games (.pgn, .pgn.gz), RookWorld's lines (.txt), prompts and answers
    (.jsonl); or a.pgn,b.txt.
    """
    rewards: str = ""
    """A Python file with functions decorated with @minigrpo.reward(): more reward parts."""
    tokenizer: str = "chess"
    """chess, the one that ships; gpt2, by tiktoken; or a path: a .tiktoken file, or GPT-2's merges
    and vocabulary.
    """
    history: int = 0
    """How many earlier moves the prompt tells."""
    prompts_per_step: int = 16
    """Prompts in one step."""
    group_size: int = 16
    """Completions of each prompt."""
    max_new_tokens: int = 96
    """Longest completion, end of text included."""
    temperature: float = 1.0
    """Sampling temperature; training log-probs use it too."""
    top_k: int = 0
    """Sample among the k most likely tokens only; training keeps the whole distribution. 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that have this probability together; training keeps the
    whole distribution.
    """
    reward_weights: str = ""
    """Weight of each reward part, as exact_fen=1,similarity=0.5; parts left out weigh 0; empty: the
    task's own.
    """
    reward_timeout: float = 10.0
    """Seconds that a reward of one's own may take for a completion; then it counts as failed."""
    overlong: Literal["keep", "mask", "punish"] = "keep"
    """Completions without an end: judged like others, left out of the loss, or punished as they
    near the limit (DAPO).
    """
    overlong_buffer: int = 16
    """Tokens before --max-new-tokens over which --overlong punish grows from 0 to -1."""
    resample_dead_groups: int = 0
    """How often prompts whose completions all have the same reward are replaced by others; 0:
    never.
    """
    max_steps: int = 1300
    """Steps to train for; the learning rate decays over them."""
    stop_after: int = 0
    """Stop after this step, as if interrupted; the learning rate still decays over --max-steps. 0:
    do not.
    """
    eval_every: int = 100
    """Steps between evaluations; 0: only before and after."""
    eval_size: int = 1024
    """Held-out examples in the first and the last evaluation."""
    eval_size_during: int = 512
    """Held-out examples in the evaluations between."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Checkpoints that are kept."""
    seed: int = 0
    """Fixes positions, samples and initial weights."""

    # --- the model ---
    init_from: str = "shipped"
    """shipped: the warm-started model in the package; scratch: random weights; or a path to a
    GPT-2's safetensors.
    """
    layers: int = 4
    """Blocks, with --init-from scratch."""
    width: int = 128
    """Size of the residual stream, with --init-from scratch."""
    heads: int = 4
    """Attention heads, with --init-from scratch."""
    context: int = 256
    """Positions, with --init-from scratch."""

    # --- the maths ---
    loss: Literal[tuple(LOSSES)] = "grpo"  # type: ignore[valid-type]
    """Row of the loss table; nll is the supervised warm start on true answers."""
    clip_low: float | None = None
    """The ratio is clipped at 1 - this; None: the loss's own."""
    clip_high: float | None = None
    """The ratio is clipped at 1 + this; None: the loss's own."""
    ratio_cap: float | None = None
    """Absolute cap of the ratio (cispo, two-sided clip); None: the loss's own."""
    advantage: Literal["auto", "group_mean", "leave_one_out"] = "auto"
    """Baseline of the advantage; auto: the loss's own."""
    scale: Literal["auto", "group", "batch", "none"] = "auto"
    """Which standard deviation divides advantages; auto: the loss's own."""
    kl: Literal[(*KL_ESTIMATORS, KL_IN_REWARD)] = "k3"  # type: ignore[valid-type]
    """KL estimator; k1_reward takes the KL off the rewards instead of adding it to the loss."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model; above 0 a frozen copy of it is kept."""
    sampler_correction: bool = False
    """Weigh tokens by min(p_trainer / p_sampler, cap): truncated importance sampling, for top-k,
    top-p and low precision.
    """
    sampler_correction_cap: float = 2.0
    """That cap."""
    num_iterations: int = 1
    """Optimizer steps on each rollout."""
    learning_rate: float = 2e-4
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.0
    """Weight decay of matrices; biases and norms have none."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""

    # --- the speed ---
    device: str = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""
    use_amp: bool = False
    """Run the model under autocast in --amp-dtype; log-softmax and the loss stay in float32."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Precision of --use-amp; float16 needs a CUDA GPU and scales the loss."""
    use_tf32: bool = False
    """TF32 matrix products on CUDA."""
    compile_model: bool = False
    """torch.compile the training blocks, but for attention; needs a C or C++ compiler and some
    warm-up.
    """
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    chunked_logprobs: bool = False
    """Compute logits in chunks and again in the backward pass: less memory for large vocabularies,
    more time.
    """
    offload_reference: bool = False
    """Keep the reference model of --kl-coef in host memory; its weights visit the GPU once a step.
    """
    low_precision_weights: bool = False
    """With --use-amp: the sampler and the reference keep the blocks' linear maps in --amp-dtype;
    the same numbers.
    """
    layout: Literal["repeated", "shared", "tree"] = "tree"
    """repeated: the textbook way; shared: each prompt and each distinct completion runs once; tree:
    each distinct prefix.
    """
    kv_cache: bool = True
    """Keep keys and values while sampling."""
    share_prompt_kv: bool = False
    """While sampling, keep a prompt's keys and values once for all of its completions: less memory,
    more time.
    """
    cuda_graphs: bool = False
    """Record the rounds of sampling as CUDA graphs, and replay them."""
    draft_answers: bool = True
    """Guess ahead from the known answer while sampling: the same tokens in fewer rounds."""
    draft_window: int = 8
    """Tokens of each row in one such round."""
    fused_optimizer: bool = True
    """AdamW's fused kernel."""
    parallel_rewards: bool = True
    """Score completions in a pool of threads."""
    num_reward_workers: int = 2
    """Threads in that pool."""
    overlap_rewards: bool = False
    """Score in that pool while the next rollout batch decodes and the reference runs."""
    skip_dead_groups: bool = True
    """Leave groups out of the update whose gradient is exactly 0: all rewards equal, no KL."""
    micro_batch_size: int = 0
    """Prompts in one forward and backward; 0: all of them."""
    rollout_batch_size: int = 0
    """Prompts that are sampled together; 0: all of them."""

    fast: bool = False
    """Turn on the layers that help on the device at hand, but those that are set; the run says
    which.
    """

    # --- the run ---
    out_dir: str = ""
    """The run's folder; empty: runs/<time>-<loss>."""
    plan: bool = False
    """Print what a step would take, tokens, FLOPs and memory, and run nothing."""
    profile: bool = False
    """Write a torch.profiler trace of steps 4 to 6 into the run's folder."""
    pg_timeout: float = 600.0
    """Seconds after which a process that waits for the others gives up."""
    resume: str = ""
    """auto: from the newest good checkpoint in --out-dir, afresh if there is none; or the step to
    resume from.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(
                field.name, getattr(self, field.name), typing.get_type_hints(type(self))[field.name]
            )
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for least, names in AT_LEAST.items():
            for name in names.split():
                if (value := getattr(self, name)) is not None and not least <= value < math.inf:
                    finite = "" if math.isfinite(value) else " and finite"
                    raise ConfigError(f"{flag(name)} must be at least {least}{finite}, got {value}")
        for name in ABOVE_ZERO.split():
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{flag(name)} must be a number above 0, got {value}")

    def _check_combinations(self) -> None:
        if self.group_size < 2 and LOSSES[self.loss].needs_group:
            raise ConfigError(
                f"--group-size must be at least 2 with --loss {self.loss}, got {self.group_size}"
            )
        if self.width % self.heads or self.width % 2:
            raise ConfigError(
                f"--width must be even and a multiple of --heads, got {self.width} and {self.heads}"
            )
        if self.top_p > 1:
            raise ConfigError(f"--top-p must be at most 1, got {self.top_p}")
        if self.overlong == "punish" and self.overlong_buffer > self.max_new_tokens:
            raise ConfigError(
                f"--overlong-buffer must be at most --max-new-tokens, got {self.overlong_buffer}"
            )
        if self.cuda_graphs and (not self.kv_cache or self.share_prompt_kv):
            raise ConfigError("--cuda-graphs needs --kv-cache, and goes without --share-prompt-kv")
        if self.profile and min(self.stop_after or self.max_steps, self.max_steps) < PROFILED[1]:
            raise ConfigError(
                f"--profile traces steps {PROFILED[0]} to {PROFILED[1]}, which this run does not "
                "reach"
            )
        if self.low_precision_weights and not self.use_amp:
            raise ConfigError(
                "--low-precision-weights goes with --use-amp, which says what precision"
            )
        if self.supervised and self.kl_coef:
            raise ConfigError(
                f"--kl-coef must be 0 with --loss {self.loss}, which samples nothing, got "
                f"{self.kl_coef}"
            )
        for name in ("micro_batch_size", "rollout_batch_size"):
            size = getattr(self, name)
            if size > self.prompts_per_step or (size and self.prompts_per_step % size):
                divisors = [
                    n for n in range(1, self.prompts_per_step + 1) if self.prompts_per_step % n == 0
                ]
                raise ConfigError(
                    f"{flag(name)} must divide --prompts-per-step {self.prompts_per_step}: "
                    f"one of {', '.join(map(str, divisors))} (0: all), got {size}"
                )
        if self.resume and not self.out_dir:
            raise ConfigError("--resume needs --out-dir, the folder of the run to go on with")
        if self.resume and self.resume != "auto" and not self.resume.isdigit():
            raise ConfigError(f"--resume must be auto or a step number, got {self.resume}")
        self.weights()

    def weights(self) -> dict[str, float]:
        """`reward_weights` as a mapping; empty for the task's own. Raises ConfigError if it does
        not read.
        """
        weights: dict[str, float] = {}
        for item in filter(None, self.reward_weights.split(",")):
            name, _, number = item.partition("=")
            try:
                weights[name.strip()] = float(number)
            except ValueError:
                weights[name.strip()] = math.nan
            if not math.isfinite(weights[name.strip()]):
                raise ConfigError(f"--reward-weights must read part=number,..., got {item!r}")
        return weights

    @property
    def supervised(self) -> bool:
        """Whether completions are the true ones, one a prompt."""
        return not LOSSES[self.loss].needs_group

    @property
    def fast_on(self) -> str:
        """The device at hand, as --fast sees it. Without instructions for it, bfloat16 is slower
        than float32.
        """
        if self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available()):
            return "cuda"
        found: dict[str, Any] = (
            getattr(torch.cpu, "get_capabilities", dict)() if self.amp_dtype == "bfloat16" else {}
        )
        return "cpu with bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") else "cpu"

    def with_fast_layers(self, given: Collection[str] = ()) -> "Config":
        """What --fast means on the device at hand, but for settings that are `given`."""
        layers = {name: value for name, value in FAST[self.fast_on].items() if name not in given}
        if not layers.get("use_amp", self.use_amp):
            layers.pop("low_precision_weights", None)
        return replace(self, **layers)

    @classmethod
    def from_toml(cls, path: str | Path) -> "Config":
        """Raises ConfigError for an unreadable file, an unknown key or a bad value."""
        values = read_toml(path)
        config = cls(**values)
        return config.with_fast_layers(values) if config.fast else config

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None) -> "Config":
        """Parse flags; what is wrong is printed as one line, and the process exits with code 2."""
        files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        files.add_argument("--config", action="append", default=[])
        try:
            chosen, rest = files.parse_known_args(argv)
            values = {
                name: value for path in chosen.config for name, value in read_toml(path).items()
            }
            try:
                defaults = cls(**values)
            except ConfigError as error:
                raise ConfigError(f"--config {', '.join(chosen.config)}: {error}") from None
            config = _parse_flags(defaults, rest)
            words = [
                word.partition("=")[0].replace("-", "_").replace("__no_", "__") for word in rest
            ]
            given = {*values, *(word.removeprefix("__") for word in words)}
            return config.with_fast_layers(given) if config.fast else config
        except (ConfigError, argparse.ArgumentError) as error:
            exit_with(error)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def as_flags(config: Config, names: Iterable[str]) -> list[str]:
    """Some of a config's settings as a user would type them."""
    on_off = {True: "", False: "no_"}
    values = {name: getattr(config, name) for name in names}
    return [
        flag(on_off[x] + name) if isinstance(x, bool) else f"{flag(name)} {x}"
        for name, x in values.items()
    ]


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file, checked for unknown keys. A table `reward_weights` is taken for
    its text form.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: is not TOML: {error}") from None
    values.pop("versions", None)  # what a run's own config.toml adds
    if isinstance(values.get("reward_weights"), Mapping):
        values["reward_weights"] = ",".join(
            f"{part}={weight}" for part, weight in values["reward_weights"].items()
        )
    known = [field.name for field in fields(Config)]
    for key in values:
        if key not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r}{did_you_mean(key, known)}")
    return values


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ConfigError unless a value is what its annotation says: a plain type, a Literal of
    strings, or None.
    """
    allowed: list[str] = []
    for option in typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,):
        choices = typing.get_args(option)
        if (
            value in choices
            if choices
            else type(value) is option or (option is float and type(value) is int)
        ):
            return
        allowed += choices or ([option.__name__] if option is not type(None) else [])
    raise ConfigError(f"{flag(name)} must be {' or '.join(allowed)}, got {value!r}")


def _parse_flags(defaults: Config, argv: list[str]) -> Config:
    names = {
        name for field in fields(Config) for name in (flag(field.name), flag("no_" + field.name))
    } | {"--help"}
    for argument in argv:
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in names:
            raise ConfigError(f"unknown flag {name}{did_you_mean(name, sorted(names))}")
    description = "Group Relative Policy Optimization. --config FILE.toml sets any of these; flags override it."
    return parse(Config, argv, default=defaults, description=description)

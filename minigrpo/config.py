"""The one Config: every setting that a run depends on, in groups, checked before any work.

A module gets the group that it needs, as `config.sampling`. Flags and `Config.of(...)` leave the
group out: `--group-size 8`, `Config.of(group_size=8)`. The docstring under a field is its --help.
Precedence: the defaults below, then `--config FILE.toml`, then the command line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tyro

from .losses import KL_ESTIMATORS, KL_IN_REWARD, LOSSES
from .runtime import combinations, renamed, settings
from .runtime.flags import ConfigError
from .runtime.settings import Above, AtLeast, AtMost, Group

Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
PositiveOrZero = Annotated[float, AtLeast(0)]
if TYPE_CHECKING:  # a type checker cannot read the table
    LossName = str
    KLName = str
else:
    LossName = Literal[tuple(LOSSES)]
    KLName = Literal[(*KL_ESTIMATORS, KL_IN_REWARD)]


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Group):
    """What the model is asked, and how its answers are scored."""

    name: Annotated[str, tyro.conf.arg(name="task")] = "chess-env"
    """chess-env, best-move, chess-env+best-move, or a Python file with a task (FILE.py)."""
    data: str = ""
    """Files to ask from instead of self-play, separated by commas: .pgn, .pgn.gz, .txt, .jsonl."""
    history: CountOrZero = 0
    """Earlier moves that a chess prompt tells."""
    rewards: str = ""
    """A Python file with functions decorated with @minigrpo.reward(): more reward parts."""
    reward_weights: str = ""
    """Weight of each reward part, as exact_fen=1,similarity=0.5; empty: the task's own."""
    reward_timeout: Positive = 10.0
    """Seconds per completion that a reward function may take before it counts as failed."""

    def weights(self) -> dict[str, float]:
        """`reward_weights` as a mapping; empty for the task's own. Raises ConfigError."""
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """Which model is trained."""

    init_from: str = "shipped"
    """shipped (a warm-started model), scratch, a run's folder, or a GPT-2's safetensors."""
    tokenizer: str = "chess"
    """chess (ships), gpt2 (by tiktoken), or a path: .tiktoken, or GPT-2's two files."""
    layers: Count = 4
    """Blocks, with --init-from scratch."""
    width: Count = 128
    """Size of the residual stream, with --init-from scratch."""
    heads: Count = 4
    """Attention heads, with --init-from scratch."""
    context: Count = 256
    """Positions, with --init-from scratch."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Group):
    """How completions are sampled."""

    prompts_per_step: Count = 16
    """Prompts per step, over all processes."""
    group_size: Count = 16
    """Completions per prompt."""
    max_new_tokens: Count = 96
    """Longest completion in tokens, end of text included."""
    temperature: Positive = 1.0
    """Sampling temperature; training divides the logits by it too."""
    top_k: CountOrZero = 0
    """Sample among the k likeliest tokens; training keeps the whole distribution. 0: all."""
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Sample among the likeliest tokens with this total probability; training keeps all."""
    dynamic_sampling: CountOrZero = 0
    """How often prompts whose completions all have equal rewards are replaced (DAPO); 0: never."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Group):
    """What is minimised."""

    name: Annotated[LossName, tyro.conf.arg(name="loss")] = "grpo"
    """A row of the loss table; nll is the supervised warm start on true answers."""
    clip_low: Annotated[float | None, AtLeast(0)] = None
    """The ratio is clipped at 1 - this; None: the loss's own."""
    clip_high: Annotated[float | None, AtLeast(0)] = None
    """The ratio is clipped at 1 + this; None: the loss's own."""
    ratio_cap: Annotated[float | None, Above(0)] = None
    """Absolute cap of the ratio (cispo, two-sided clip); None: the loss's own."""
    advantage: Literal["auto", "group_mean", "leave_one_out"] = "auto"
    """Baseline of the advantage; auto: the loss's own."""
    scale: Literal["auto", "group", "batch", "none"] = "auto"
    """Which standard deviation divides advantages; auto: the loss's own."""
    kl: KLName = "k3"
    """KL estimator; k1_reward takes the KL off the rewards instead of adding it to the loss."""
    kl_coef: PositiveOrZero = 0.0
    """Weight of the KL to the initial model; above 0 a frozen copy of it is kept."""
    overlong: Literal["keep", "mask", "punish"] = "keep"
    """Completions without an end: scored as they are, left out, or punished by length (DAPO)."""
    overlong_buffer: Count = 16
    """Tokens before --max-new-tokens over which --overlong punish grows from 0 to -1."""
    sampler_correction: bool = False
    """Weigh each token by min(p_trainer / p_sampler, cap): truncated importance sampling."""
    sampler_correction_cap: Positive = 2.0
    """The cap of --sampler-correction."""
    shuffle_rewards: bool = False
    """A control: shuffle the rewards within each group, so that nothing can be learnt from them."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Group):
    """AdamW and its schedule."""

    num_iterations: Count = 1
    """Optimizer steps per rollout."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 10
    """Steps over which the learning rate rises."""
    weight_decay: PositiveOrZero = 0.0
    """Weight decay of matrices; biases and norms have none."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(Group):
    """Speed layers, one flag each. None of them changes what is computed."""

    fast: bool = False
    """Turn on the layers that help on this device, unless they are set; the run lists them."""
    device: str = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""
    use_amp: bool = False
    """Run the model under autocast in --amp-dtype; log-softmax and the loss stay in float32."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Precision of --use-amp; float16 needs a CUDA GPU and scales the loss."""
    low_precision_weights: bool = False
    """With --use-amp: the sampler and the reference keep the blocks' linear maps in --amp-dtype."""
    use_tf32: bool = False
    """TF32 matrix products on CUDA."""
    compile_model: bool = False
    """torch.compile the training blocks without their attention; needs a C or C++ compiler."""
    packing: Literal["repeated", "shared-prompt", "prefix-tree"] = "prefix-tree"
    """What runs once: nothing, each prompt and distinct completion, or each distinct prefix."""
    kv_cache: bool = True
    """Keep keys and values while sampling."""
    speculative_decoding: bool = True
    """Propose tokens from the known answer while sampling: the same tokens in fewer rounds."""
    num_speculative_tokens: CountOrZero = 7
    """Tokens that are proposed per completion and round."""
    cuda_graphs: bool = False
    """Capture the rounds of sampling as CUDA graphs, and replay them."""
    fused_optimizer: bool = True
    """AdamW's fused kernel."""
    skip_zero_variance_groups: bool = True
    """Leave groups out of the update whose gradient is exactly 0: equal rewards, no KL."""
    parallel_rewards: bool = True
    """Score completions in a pool of threads."""
    num_reward_workers: Count = 2
    """Threads in that pool."""
    overlap_rewards: bool = False
    """Score in that pool while the next rollout batch decodes and the reference runs."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Group):
    """Less memory for more time. None of these changes what is computed."""

    micro_batch_size: CountOrZero = 0
    """Prompts per forward and backward; 0: all of them."""
    rollout_batch_size: CountOrZero = 0
    """Prompts that are sampled together; 0: all of them."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    chunked_logprobs: bool = False
    """Compute logits in chunks, and again in the backward pass: for large vocabularies."""
    offload_reference: bool = False
    """Keep the reference model of --kl-coef in host memory between steps."""
    share_prompt_kv: bool = False
    """While sampling, keep a prompt's keys and values once for all of its completions."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Group):
    """How long a run is, what it evaluates, and what it leaves behind."""

    max_steps: Count = 350
    """Steps to train for; the learning rate decays over them."""
    stop_after: CountOrZero = 0
    """Stop after this step as if interrupted, without changing the schedule. 0: do not."""
    eval_every: CountOrZero = 100
    """Steps between evaluations; 0: only before and after."""
    eval_size: Count = 1024
    """Held-out examples in the first and the last evaluation."""
    eval_size_during: Count = 512
    """Held-out examples in the evaluations between."""
    save_every: Count = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Count = 2
    """Checkpoints that are kept."""
    seed: CountOrZero = 0
    """Fixes examples, samples and initial weights."""
    out_dir: str = ""
    """The run's folder; empty: runs/<time>-<loss>."""
    resume: str = ""
    """auto (the newest whole checkpoint in --out-dir, if any), or the step to resume from."""
    plan: bool = False
    """Print what a step would take (tokens, FLOPs, memory), and run nothing."""
    profile: bool = False
    """Write a torch.profiler trace of steps 4 to 6 into the run's folder."""
    pg_timeout: Positive = 600.0
    """Seconds after which a process that waits for the others gives up."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, by group. Raises ConfigError in one line for what cannot be."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    speed: SpeedConfig = SpeedConfig()
    memory: MemoryConfig = MemoryConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        combinations.check(self)

    @classmethod
    def of(cls, **flat_settings: Any) -> Self:
        """A config from settings under their flags' names: `Config.of(group_size=8)`."""
        return cls().replace(**flat_settings)

    def replace(self, **flat_settings: Any) -> Self:
        """The same config with some settings changed, under their flags' names."""
        groups = settings.grouped(type(self), renamed.modern(flat_settings))
        return replace(self, **{g: replace(getattr(self, g), **x) for g, x in groups.items()})

    def flat(self) -> dict[str, Any]:
        """Every setting under its flag's name."""
        return settings.flat(self)

    @property
    def supervised(self) -> bool:
        """Whether completions are the true answers, one per prompt."""
        return not LOSSES[self.loss.name].needs_group

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Raises ConfigError for an unreadable file, an unknown key or a bad value."""
        return settings.from_toml(cls, path)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, *, prog: str | None = None) -> Self:
        """Parse flags; what is wrong is printed as one line, and the process exits with code 2."""
        return settings.from_cli(cls, argv, prog)

"""Config: every setting that a run depends on, in groups, validated before any work starts.

In Python a setting is `config.sampling.group_size`; flags and `Config.of(...)` leave the group out:
`--group-size 8`, `Config.of(group_size=8)`. The docstring under a field is its --help text. How
groups become flags and TOML is in runtime/settings.py. Precedence: the defaults below, the settings
of the task (tasks/registry.py), `--config FILE.toml`, the command line; the last one wins.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tyro

from .losses import KL_ESTIMATORS, KL_IN_REWARD, LOSSES, SCALES
from .model.architectures import ArchName
from .runtime import combinations
from .runtime.constraints import Above, AtLeast, AtMost, Group, SeveralLines
from .runtime.fast import fast_layers
from .runtime.reward_weights import parse_weights
from .runtime.settings import Grouped
from .tasks.registry import settings_by_task

# The upper limits only refuse slips of the keyboard, which would fill the memory or never end.
Count = Annotated[int, AtLeast(1), AtMost(10**9)]
CountOrZero = Annotated[int, AtLeast(0), AtMost(10**9)]
Size = Annotated[int, AtLeast(1), AtMost(10**6)]
Few = Annotated[int, AtLeast(0), AtMost(1024)]
PositiveOrZero = Annotated[float, AtLeast(0)]
if TYPE_CHECKING:  # type checkers cannot evaluate the table
    LossName = str
    KLName = str
    ScaleName = str
else:
    LossName = Literal[tuple(LOSSES)]
    KLName = Literal[(*KL_ESTIMATORS, KL_IN_REWARD)]
    ScaleName = Literal[("auto", *SCALES)]


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Group):
    """What the model is asked, and how its answers are scored."""

    name: Annotated[str, tyro.conf.arg(name="task")] = "chess-env"
    """A task of docs/tasks.md (chess-env, prompts, math, code, ..) or a Python file (FILE.py)."""
    data: str = ""
    """Comma-separated files with prompts, instead of self-play: .pgn, .pgn.gz, .txt, .jsonl."""
    system: Annotated[str, SeveralLines()] = ""
    """A system message for all prompts without their own; the chat template then writes them."""
    difficulty: str = ""
    """Problems that countdown makes: numbers x the largest, equally many of each of 2x12,3x12."""
    history: Few = 0
    """Number of earlier moves that a chess prompt includes."""
    confidence: bool = False
    """Ask how sure each answer is, and pay for calibration too (RLCR); not for --task teach."""
    student: str = ""
    """The frozen model that --task teach explains to: a path or ORG/NAME; or shipped."""
    rewards: str = ""
    """A Python file with more reward parts: functions decorated with @minigrpo.reward()."""
    reward_weights: str = ""
    """Weights of reward parts, such as exact_fen=1,similarity=0.5; parts left out weigh 0."""
    reward_timeout: Annotated[float, AtLeast(0.001), AtMost(10**7)] = 10.0
    """Seconds per completion that a reward function may take before it counts as failed."""

    def weights(self) -> dict[str, float]:
        """`reward_weights` as a mapping; empty means the defaults. Raises ConfigError."""
        return parse_weights(self.reward_weights)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """Which model is trained."""

    init_from: str = "shipped"
    """shipped, scratch, a run's folder, a model's folder or file, or ORG/NAME on the Hub."""
    tokenizer: str = "auto"
    """auto (that of the model, else chess), chess, gpt2, a folder or file, or ORG/NAME."""
    chat_template: str = ""
    """A jinja2 file that writes prompts from messages, instead of the model's own template."""
    arch: ArchName = "gpt2"
    """Family of the model, with --init-from scratch."""
    layers: Size = 4
    """Transformer blocks, with --init-from scratch."""
    width: Size = 128
    """Size of the residual stream, with --init-from scratch."""
    heads: Size = 4
    """Attention heads, with --init-from scratch."""
    kv_heads: Few = 0
    """Heads of keys and values, which --heads share (llama, qwen3), with scratch; 0: as many."""
    context: Size = 256
    """Context length in tokens, with --init-from scratch."""
    lora_rank: Few = 0
    """Train adapters of this rank (LoRA) beside frozen weights; 0: train all weights."""
    lora_alpha: PositiveOrZero = 0.0
    """Adapters are scaled by this over --lora-rank; 0: twice the rank."""
    lora_targets: str = ""
    """Comma-separated layers with adapters, such as q_proj,v_proj; empty: all in the blocks."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """How frozen weights are stored: under --lora-rank, of --student and other reward models."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Group):
    """How completions are sampled."""

    prompts_per_step: Size = 16
    """Prompts per step, over all processes."""
    group_size: Size = 16
    """Completions per prompt."""
    max_new_tokens: Size = 96
    """Longest completion in tokens, end of text included."""
    temperature: Annotated[float, AtLeast(0.001), AtMost(1000)] = 1.0
    """Sampling temperature; training divides the logits by it too."""
    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; training uses the full distribution. 0: all."""
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Sample from the most likely tokens with this total probability; training uses all."""
    min_p: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """Sample from tokens at least this times as likely as the likeliest; training uses all."""
    dynamic_sampling: Few = 0
    """Times per step to replace prompts whose completions have equal rewards (DAPO); 0: off."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Group):
    """What is minimised."""

    name: Annotated[LossName, tyro.conf.arg(name="loss")] = "grpo"
    """The policy loss; nll is supervised training on true answers, the warm start."""
    clip_low: Annotated[float | None, AtLeast(0), AtMost(10**6)] = None
    """The ratio is clipped at 1 - this; unset: the loss's default."""
    clip_high: Annotated[float | None, AtLeast(0), AtMost(10**6)] = None
    """The ratio is clipped at 1 + this; unset: the loss's default."""
    ratio_cap: Annotated[float | None, Above(0), AtMost(10**6)] = None
    """Absolute cap on the ratio (cispo, two-sided clip); unset: the loss's default."""
    advantage: Literal["auto", "group_mean", "leave_one_out"] = "auto"
    """Baseline of the advantage; auto: the loss's default."""
    scale: ScaleName = "auto"
    """What divides advantages: a standard deviation, the group's mean; auto: the loss's default."""
    kl: KLName = "k3"
    """KL estimator; k1_reward subtracts the KL from the rewards, the others add it to the loss."""
    kl_coef: PositiveOrZero = 0.0
    """Weight of the KL to the initial model; above 0 a frozen copy is kept, except with LoRA."""
    overlong: Literal["keep", "mask", "punish"] = "keep"
    """Overlong completions: kept, masked out of the loss, or penalised by length (DAPO)."""
    overlong_buffer: Count = 16
    """Last tokens before --max-new-tokens, over which --overlong punish goes from 0 to -1."""
    sampler_correction: bool = False
    """Weight each token by min(p_trainer / p_sampler, cap): truncated importance sampling."""
    sampler_correction_cap: Annotated[float, Above(0), AtMost(10**6)] = 2.0
    """The cap of --sampler-correction."""
    shuffle_rewards: bool = False
    """For control runs: shuffle rewards within each group, so that they carry no signal."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Group):
    """AdamW and its schedule."""

    num_iterations: Count = 1
    """Optimizer steps per rollout."""
    learning_rate: Annotated[float, Above(0)] = 6e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 10
    """Steps of linear learning-rate warm-up."""
    weight_decay: PositiveOrZero = 0.0
    """Weight decay on matrices; biases and norms have none."""
    grad_clip: Annotated[float, Above(0)] = 1.0
    """The gradient is clipped to this norm."""


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(Group):
    """Speed layers, one flag each. None of them changes results beyond rounding."""

    fast: bool = False
    """Turn on the layers that help on this device, except where set; the run lists them."""
    device: str = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""
    use_amp: bool = False
    """Run the model under autocast in --amp-dtype; log-softmax and the loss stay in float32."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Precision of --use-amp; float16 needs a CUDA GPU and scales the loss."""
    low_precision_weights: bool = False
    """With --use-amp: sampler and reference store the blocks' linear layers in --amp-dtype."""
    use_tf32: bool = False
    """TF32 matrix products on CUDA."""
    onednn: bool = True
    """Large float32 products by oneDNN, on CPUs with AVX-512 other than Intel's: MKL is slower."""
    keep_freed_memory: bool = True
    """On a CPU, keep freed memory in the process (glibc only): getting new pages takes time."""
    compile_model: bool = False
    """torch.compile the training blocks, except attention; needs a C or C++ compiler."""
    packing: Literal["repeated", "shared-prompt", "prefix-tree"] = "prefix-tree"
    """What runs only once: nothing, each prompt and distinct completion, or each prefix."""
    kv_cache: bool = True
    """Cache keys and values while sampling."""
    speculative_decoding: bool = True
    """Propose tokens from the known answer while sampling: same tokens, fewer rounds."""
    num_speculative_tokens: Few = 7
    """Most tokens proposed per completion and decoding round; fewer while few of them are right."""
    cuda_graphs: bool = False
    """Capture decoding rounds as CUDA graphs, and replay them."""
    fused_optimizer: bool = True
    """Use AdamW's fused kernel."""
    skip_zero_variance_groups: bool = True
    """Leave out of the update groups whose gradient is exactly 0: equal rewards, no KL."""
    parallel_rewards: bool = True
    """Score completions in a thread pool."""
    num_reward_workers: Annotated[int, AtLeast(1), AtMost(256)] = 2
    """Threads in the reward pool."""
    overlap_rewards: bool = False
    """Score in the reward pool while the next rollout batch decodes and the reference runs."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Group):
    """Less memory for more time. Results stay the same, except for bnpo with micro-batches."""

    micro_batch_size: CountOrZero = 0
    """Prompts per forward and backward pass; 0: all of them."""
    rollout_batch_size: CountOrZero = 0
    """Prompts sampled together, others enter as completions end; 0: all of them."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    chunked_logprobs: bool = False
    """Compute logits in chunks, and recompute them in backward; for large vocabularies."""
    offload_reference: bool = False
    """Keep the reference of --kl-coef, and models of rewards, in host memory between steps."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between steps."""
    share_prompt_kv: bool = False
    """While sampling, store a prompt's keys and values once for all of its completions."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Group):
    """How long a run is, when it evaluates, and what it saves."""

    max_steps: Count = 350
    """Steps to train for; the learning rate decays over them."""
    stop_after: CountOrZero = 0
    """Stop after this step as if interrupted; the schedule does not change. 0: off."""
    eval_every: CountOrZero = 100
    """Steps between evaluations; 0: only before and after training."""
    eval_size: Size = 1024
    """Held-out examples in the first and the last evaluation."""
    eval_size_during: Size = 512
    """Held-out examples in the evaluations in between."""
    eval_samples: Annotated[int, AtLeast(1), AtMost(1024)] = 1
    """Completions sampled per example of an evaluation; above 1 it also has pass@k."""
    save_every: Count = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Count = 2
    """How many of the newest checkpoints to keep."""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] = 0
    """Seed for examples, samples and initial weights."""
    out_dir: str = ""
    """The run's folder; empty: runs/<time>-<loss>."""
    resume: str = ""
    """auto (the newest intact checkpoint in --out-dir, if any), or the step to resume from."""
    plan: bool = False
    """Print the estimated tokens, FLOPs, memory and seconds of a step, and run nothing."""
    track: Literal["none", "wandb", "trackio"] = "none"
    """Also log to Weights & Biases or to Trackio (extras wandb and trackio)."""
    profile: bool = False
    """Write a torch.profiler trace of the 4th to 6th step from the start or the resume."""
    pg_timeout: Annotated[float, AtLeast(1), AtMost(31_536_000)] = 600.0
    """Seconds that a process waits for the others before it fails."""


@dataclass(frozen=True, kw_only=True)
class Config(Grouped):
    """All settings of a run, by group. Raises ConfigError for an invalid combination."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    speed: SpeedConfig = SpeedConfig()
    memory: MemoryConfig = MemoryConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        combinations.check(self, LOSSES[self.loss.name])

    @property
    def supervised(self) -> bool:
        """Whether completions are the true answers, one per prompt."""
        return not LOSSES[self.loss.name].needs_group

    @staticmethod
    def settings_by_task() -> Mapping[str, Mapping[str, Any]]:
        """The settings of built-in tasks, which count below --config and the command line."""
        return settings_by_task()

    def resolved(self, given: Collection[str]) -> Self:
        """This config with the layers of --fast, except the settings that are `given`."""
        return replace(self, **self._groups(fast_layers(self.speed, given)))

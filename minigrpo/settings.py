"""Every setting of a run, in groups. config.py reads them from flags, files and Python.

The text under a field is its --help.
"""

import json
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.fields import FieldInfo

FROM_PYTHON = "python:"  # begins a setting that stands for an object of the caller's
# models that have no folder: the shipped one, and random weights
SHIPPED, SCRATCH = "shipped", "scratch"
SELF, INITIAL = "self", "initial"  # the trained model, and a copy of it before the first step
T = TypeVar("T")
SHORT_HELP = "short help"  # marks the settings that the short help lists
Common = Annotated[T, SHORT_HELP]
LOSS_NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "maxrl", "nll")


def read_pairs(value: Any) -> Any:
    """Read a text of pairs as a dict: `"a=false,b=2x12,3x12"` has a bool and a text.

    Values may be JSON, or Python's True and False. A comma separates pairs only before NAME=.
    """
    if not isinstance(value, str):
        return value
    texts = re.split(r",\s*(?=\w+=)", value)
    if not all("=" in text for text in texts if text):
        raise ValueError("give NAME=VALUE,..")
    pairs: dict[str, Any] = dict(text.split("=", 1) for text in texts if text)
    for name, text in pairs.items():
        with suppress(ValueError):
            pairs[name] = json.loads(text.lower() if text in ("True", "False") else text)
    return pairs


# a flag is a text, which the setting's own type reads
AsPairs = tyro.conf.arg(constructor=str, metavar="NAME=VALUE,..", help_behavior_hint="")
Arguments = Annotated[dict[str, Any], BeforeValidator(read_pairs), AsPairs]
RewardWeights = Annotated[dict[str, float], BeforeValidator(read_pairs), AsPairs]
# a line break is hard to write in a shell
AsLines = AfterValidator(lambda text: text.replace(r"\n", "\n"))
AsList = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
StopTexts = Annotated[list[Annotated[str, Field(min_length=1), AsLines]], AsList]
Paths = Annotated[str, AfterValidator(os.path.expanduser)]
LossName = Annotated[Paths, Field(pattern=f"^({'|'.join(LOSS_NAMES)}|.+:.+)$")]
OnePath = Annotated[Path, AfterValidator(Path.expanduser)]


class Group(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TaskConfig(Group):
    """What the model is asked, and how its answers are scored."""

    name: Common[Annotated[Paths, tyro.conf.arg(name="task")]] = "auto"
    """A task of docs/tasks.md, or FILE.py; auto means prompts for rows, chess-env without any."""
    task_args: Arguments = {}
    """Settings of this task alone, such as difficulty=2x12,3x12 (docs/tasks.md)."""
    data: Common[Paths] = ""
    """Comma-separated JSONL files to train on."""
    eval_data: Paths = ""
    """Files to evaluate on; without them, a tenth of the questions of --data is held out."""
    system: str = ""
    """A system message for prompts that have none; the chat template then writes all prompts."""
    rewards: Common[Paths] = ""
    """A Python file with more reward functions, decorated with @minigrpo.reward."""
    environment: Paths = ""
    """FILE.py:NAME,..: a class that answers turns, or functions as tools (docs/turns.md)."""
    reward_weights: RewardWeights = {}
    """Weights of reward functions, such as exact_fen=1,similarity=0.5; others get 0."""


class ModelConfig(Group):
    """Which model is trained."""

    name: Common[Annotated[Paths, tyro.conf.arg(name="model")]] = "shipped"
    """shipped, scratch, a run, a folder (random weights if it has none), PEFT's, or ORG/NAME."""
    tokenizer: Paths = "auto"
    """auto (the model's own, else chess), chess, gpt2, a folder or file, or ORG/NAME."""
    chat_template: Paths = ""
    """A jinja2 file that writes prompts from messages, instead of the model's own template."""
    chat_args: Arguments = {}
    """Variables of the chat template, such as enable_thinking=false."""
    lora_rank: Common[NonNegativeInt] = 0
    """Rank of adapters (LoRA) that are trained beside frozen weights; 0 trains all weights."""
    lora_alpha: NonNegativeFloat = 0.0
    """Adapters are scaled by this over --lora-rank; 0 means twice the rank."""
    lora_targets: str = ""
    """Layers with adapters, such as q_proj,v_proj; empty means all linear layers in the blocks."""
    base_dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Storage of frozen weights: under --lora-rank, of --reference, --teacher, rewards' models."""

    @property
    def matrix_dtype(self) -> str:
        """How the matrices of --model are stored: without adapters they are trained, in float32."""
        return self.base_dtype if self.lora_rank else "float32"


class SamplingConfig(Group):
    """How completions are sampled."""

    prompts_per_step: Common[PositiveInt] = 16
    """Prompts per step, over all processes."""
    group_size: Common[PositiveInt] = 16
    """Completions per prompt."""
    max_new_tokens: Common[PositiveInt] = 96
    """Most tokens of a completion, end of text included."""
    max_turns: PositiveInt = 8
    """Most turns of the model with --environment; --max-new-tokens counts all turns together."""
    temperature: float = Field(1.0, ge=0.001)
    """Sampling temperature; training divides the logits by it too."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens (0 means all); training uses all tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability; training uses all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this times as likely as the likeliest; training uses all."""
    stop: StopTexts = []
    """Texts that end a completion and stay in it, such as "</answer>"; \\n is a line break."""
    dynamic_sampling: NonNegativeInt = 0
    """How often a step may replace prompts whose completions have equal rewards (DAPO)."""

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class LossConfig(Group):
    """What is minimised."""

    name: Common[Annotated[LossName, tyro.conf.arg(name="loss")]] = "grpo"
    """A loss of losses.py (nll is supervised fine-tuning on true answers), or FILE.py:NAME."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped at 1 - this; the default depends on the loss."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped at 1 + this; the default depends on the loss."""
    ratio_cap: PositiveFloat | None = None
    """Largest ratio (cispo, two-sided clip); the default depends on the loss."""
    scale: Literal["auto", "group", "batch", "mean", "none"] = "auto"
    """Divisor of advantages: a standard deviation, or the group's mean; auto follows the loss."""
    kl: Literal["k2", "k3", "k3_is"] = "k3"
    """Estimator of the KL that is added to the loss."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model, of which a frozen copy is kept, except with LoRA."""
    reference: Paths = ""
    """Another model for the KL, named as for --model, with the same tokenizer."""
    overlong: Literal["keep", "mask"] = "keep"
    """Completions that are cut off are kept in the loss, or masked out."""
    sampler_correction: Literal[
        "none", "token-truncate", "token-mask", "icepop", "sequence-truncate", "sequence-mask"
    ] = "none"
    """Weigh tokens by p_old / p_sampler; docs/performance.md has the ways."""
    sampler_cap: PositiveFloat = 3.0
    """Largest ratio of --sampler-correction."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of a bonus for entropy, which is subtracted from the loss."""
    teacher: Paths = ""
    """A model to distil, named as for --model, or self (the trained one), or initial."""
    teacher_coef: NonNegativeFloat = 1.0
    """Weight of log p_teacher - log p of each token, which is added to its advantage."""
    teacher_context: str = ""
    """A field of the rows whose text --teacher reads beside the prompt, such as a solution."""
    shuffle_rewards: bool = False
    """Shuffle rewards within each group, so that they carry no signal (a control run)."""

    @property
    def reference_model(self) -> str | None:
        """The model of the KL by its name, or None without a KL."""
        return (self.reference or INITIAL) if self.kl_coef else None


class OptimizerConfig(Group):
    """AdamW and its schedule."""

    num_iterations: PositiveInt = 1
    """Optimizer steps per rollout."""
    learning_rate: Common[PositiveFloat] = 6e-4
    """Peak learning rate; over --max-steps it falls by a cosine to a tenth."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear learning-rate warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases and norms have none."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient, which is clipped to it."""


class SpeedConfig(Group):
    """Speed layers, one flag each. None of them changes results beyond rounding."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""
    use_amp: bool = False
    """Run the model under autocast in --amp-dtype; log-softmax and the loss stay in float32."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Precision of --use-amp; float16 needs a CUDA GPU and scales the loss."""
    use_tf32: bool = False
    """TF32 matrix products on CUDA."""
    compile_model: bool = False
    """torch.compile the training blocks, except attention; needs a C or C++ compiler."""
    cuda_graphs: bool = False
    """Launch a decoding round at once by a CUDA graph, not kernel by kernel."""
    packing: Literal["repeated", "prefix-tree"] = "prefix-tree"
    """prefix-tree runs each distinct prefix once in the update; repeated runs all completions."""
    num_speculative_tokens: NonNegativeInt = 4
    """Tokens of the known answer proposed per decoding round: same tokens, fewer rounds."""
    fused_optimizer: bool = True
    """Use AdamW's fused kernel."""
    parallel_rewards: bool = True
    """Score completions in a thread pool."""
    num_reward_workers: PositiveInt = 2
    """Threads in the reward pool."""


class MemoryConfig(Group):
    """Less memory for more time. Results stay the same."""

    micro_batch_size: NonNegativeInt = 0
    """Prompts per forward and backward pass; 0 means all of them, or on CUDA as many as fit."""
    rollout_batch_size: NonNegativeInt = 0
    """Prompts sampled together (0: all, or on CUDA as many as fit); others enter as these end."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass; on CUDA also where nothing fits without."""
    offload_reference: bool = False
    """Keep the reference, the teacher and rewards' models in host memory between uses."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between steps."""
    fsdp: bool = False
    """With torchrun: each process keeps a share of weights, gradients and moments (FSDP2)."""


class RunConfig(Group):
    """How long a run is, when it evaluates, and what it saves."""

    max_steps: Common[PositiveInt] = 350
    """Steps to train for; the learning rate decays over them."""
    stop_after: NonNegativeInt = 0
    """Stop after this step as if interrupted, without a change of the schedule; 0 never stops."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations; 0 evaluates only before and after training."""
    eval_size: PositiveInt = 512
    """Held-out examples per evaluation."""
    eval_samples: PositiveInt = 1
    """Completions per example of an evaluation; above 1 it also measures pass@k."""
    save_every: PositiveInt = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed for examples, samples and initial weights."""
    out_dir: Common[Paths] = ""
    """The run's folder; empty means runs/<time>-<loss>."""
    resume: Paths = ""
    """auto (continue in --out-dir if it holds a run), or a run or checkpoint to branch from."""
    profile: bool = False
    """Write a torch.profiler trace of the 4th to 6th step from the start or the resume."""


class Settings(Group):
    """All settings. `Config` is the same with what reads and checks them."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    speed: SpeedConfig = SpeedConfig()
    memory: MemoryConfig = MemoryConfig()
    run: RunConfig = RunConfig()


@cache
def places() -> dict[str, tuple[str, str]]:
    """Flat name -> (group, field), in order of declaration."""
    return {
        group if field == "name" else field: (group, field)
        for group in Settings.model_fields
        for field in fields_of(group)
    }


def fields_of(group: str) -> dict[str, FieldInfo]:
    return type(getattr(Settings(), group)).model_fields

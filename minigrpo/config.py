"""Config: every setting of a run, in groups, checked before any work starts.

In Python a setting is `config.sampling.group_size`; flags, TOML files without tables and
`Config.of(...)` leave the group out: `--group-size 8`, `Config.of(group_size=8)`. The setting
`name` of a group is the flag of the group: `config.loss.name` is `--loss`. The text under a field
is its --help.

Settings take one way: flags and files become a dict of what is given (`read_flags`, `read_toml`),
and `settle` makes a Config of it. Precedence, the last one wins: the defaults below, those of the
task and those of a published model (defaults.py), `--config FILE.toml`, the command line.
"""

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict, get_type_hints

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
    ValidationError,
)

from .defaults import Size, defaults_for
from .errors import ConfigError, refusing

# a word of TRL (GRPOConfig, GRPOTrainer or the command line) -> what is here instead
TRL_WORDS: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("trl_words.toml").read_text("utf-8")
)
LOSS_NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "maxrl", "nll")


def read_pairs(value: Any) -> Any:
    """`"a=1,b=2"` as a dict; a comma separates only where NAME= follows: `"sizes=2x12,3x12"`."""
    if not isinstance(value, str):
        return value
    return dict(pair.split("=", 1) for pair in re.split(r",\s*(?=\w+=)", value) if pair)


def read_json_pairs(value: Any) -> Any:
    """`read_pairs`, with JSON read as such: `"a=false,b=word"` as a bool and a text."""
    pairs = read_pairs(value)
    for name, text in pairs.items() if isinstance(value, str) else ():
        with suppress(ValueError):
            pairs[name] = json.loads(text)
    return {name: x for name, x in pairs.items() if x is not None}


# a text, which the setting's type reads
AsPairs = tyro.conf.arg(constructor=str, metavar="NAME=VALUE,..", help_behavior_hint="")
Arguments = Annotated[dict[str, Any], BeforeValidator(read_json_pairs), AsPairs]
PartWeights = Annotated[dict[str, float], BeforeValidator(read_pairs), AsPairs]


def read_line_breaks(text: str) -> str:
    r"""A shell cannot well write a line break, so there it is \n."""
    return text.replace(r"\n", "\n")


StopText = Annotated[str, Field(min_length=1), AfterValidator(read_line_breaks)]
StopTexts = Annotated[
    list[StopText], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


def expanded(text: str) -> str:
    """A setting that may name files, comma-separated: ~ is the user's folder."""
    return re.sub(r"(^|,\s*)(~[^,]*)", lambda match: match[1] + os.path.expanduser(match[2]), text)


Paths = Annotated[str, AfterValidator(expanded)]
OnePath = Annotated[Path, AfterValidator(Path.expanduser)]


class Group(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TaskConfig(Group):
    """What the model is asked, and how its answers are scored."""

    name: Annotated[Paths, tyro.conf.arg(name="task")] = "auto"
    """One of docs/tasks.md (math, code, ..) or FILE.py; auto: prompts for rows, else chess-env."""
    task_args: Arguments = {}
    """Settings of this task alone, such as difficulty=2x12,3x12 (docs/tasks.md)."""
    data: Paths = ""
    """Comma-separated files to train on: .jsonl; for chess also .pgn and .pgn.gz."""
    eval_data: Paths = ""
    """Files that are held out whole; without them, a tenth of the questions of --data is."""
    system: str = ""
    """A system message for all prompts without their own; the chat template then writes them."""
    rewards: Paths = ""
    """A Python file with more reward functions, decorated with @minigrpo.reward."""
    environment: Paths = ""
    """FILE.py:NAME,FILE.py:NAME: a class that answers turns, functions as tools (docs/turns.md)."""
    reward_weights: PartWeights = {}
    """Weights of reward functions, such as exact_fen=1,similarity=0.5; others weigh 0."""


class ModelConfig(Group):
    """Which model is trained."""

    name: Annotated[Paths, tyro.conf.arg(name="model")] = "shipped"
    """shipped, scratch, a run, a model's folder (config.json alone: random) or PEFT's, ORG/NAME."""
    tokenizer: Paths = "auto"
    """auto (that of the model, else chess), chess, gpt2, a folder or file, or ORG/NAME."""
    chat_template: Paths = ""
    """A jinja2 file that writes prompts from messages, instead of the model's own template."""
    chat_args: Arguments = {}
    """Variables of the chat template, such as enable_thinking=false."""
    lora_rank: NonNegativeInt = 0
    """Train adapters of this rank (LoRA) beside frozen weights; 0: train all weights."""
    lora_alpha: NonNegativeFloat = 0.0
    """Adapters are scaled by this over --lora-rank; 0: twice the rank."""
    lora_targets: str = ""
    """Comma-separated layers with adapters, such as q_proj,v_proj; empty: all in the blocks."""
    base_dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """How frozen weights are stored: under --lora-rank, of --reference, of models of rewards."""


class SamplingConfig(Group):
    """How completions are sampled."""

    prompts_per_step: PositiveInt = 16
    """Prompts per step, over all processes."""
    group_size: PositiveInt = 16
    """Completions per prompt."""
    max_new_tokens: PositiveInt = 96
    """Longest completion in tokens, end of text included."""
    max_turns: PositiveInt = 8
    """With --environment, most turns of the model; --max-new-tokens counts all turns together."""
    temperature: float = Field(1.0, ge=0.001)
    """Sampling temperature; training divides the logits by it too."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; training uses the full distribution. 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability; training uses all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this share as likely as the likeliest; training uses all."""
    stop: StopTexts = []
    """Texts that end a completion, such as "</answer>"; the text is kept. \\n is a line's end."""
    dynamic_sampling: NonNegativeInt = 0
    """Times per step to replace prompts whose completions have equal rewards (DAPO); 0: off."""


class LossConfig(Group):
    """What is minimised."""

    name: Annotated[Paths, tyro.conf.arg(name="loss")] = "grpo"
    """A loss of losses.py (nll: supervised fine-tuning on true answers), or FILE.py:NAME."""
    clip_low: NonNegativeFloat | None = None
    """Where a loss clips the ratio, at 1 - this; unset: the loss's default."""
    clip_high: NonNegativeFloat | None = None
    """Where a loss clips the ratio, at 1 + this; unset: the loss's default."""
    ratio_cap: PositiveFloat | None = None
    """Absolute cap on the ratio (cispo, two-sided clip); unset: the loss's default."""
    scale: Literal["auto", "group", "batch", "mean", "none"] = "auto"
    """What divides advantages: a standard deviation, the group's mean; auto: the loss's default."""
    aggregate: Literal["sum-then-normalize", "normalize-then-sum"] = "sum-then-normalize"
    """normalize-then-sum (GDPO): each reward by its groups' std, the sum by the batch's."""
    kl: Literal["k2", "k3", "k3_is", "k1_reward"] = "k3"
    """KL estimator; k1_reward subtracts the KL from the rewards, the others add it to the loss."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model; above 0 a frozen copy is kept, except with LoRA."""
    reference: Paths = ""
    """Another model for the KL, named as for --model, with the same tokenizer."""
    overlong: Literal["keep", "mask", "punish"] = "keep"
    """Overlong completions: kept, masked out, or over the last fifth down to -1 (DAPO)."""
    sampler_correction: Literal[
        "none", "token-truncate", "token-mask", "icepop", "sequence-truncate", "sequence-mask"
    ] = "none"
    """Weigh tokens by p_trainer / p_sampler, in one of the ways of docs/performance.md."""
    sampler_cap: PositiveFloat = 3.0
    """Largest ratio of --sampler-correction."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of a bonus for entropy: this times the entropy is subtracted from the loss."""
    teacher: Paths = ""
    """Distil a model: named as for --model, self (the trained one) or initial (docs/tasks.md)."""
    teacher_coef: NonNegativeFloat = 1.0
    """Weight of the KL to --teacher beside the rewards: log p_teacher - log p of each token."""
    teacher_context: str = ""
    """A field of the rows whose text --teacher reads beside the prompt, such as a solution."""
    shuffle_rewards: bool = False
    """For control runs: shuffle rewards within each group, so that they carry no signal."""


class OptimizerConfig(Group):
    """AdamW and its schedule."""

    num_iterations: PositiveInt = 1
    """Optimizer steps per rollout."""
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate; it falls by a cosine to a tenth of that over --max-steps."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear learning-rate warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay on matrices; biases and norms have none."""
    grad_clip: PositiveFloat = 1.0
    """The gradient is clipped to this norm."""


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
    """Decode by CUDA graphs: a round is launched at once, not kernel by kernel."""
    packing: Literal["repeated", "prefix-tree"] = "prefix-tree"
    """The update runs each distinct prefix once; repeated: every completion in full."""
    num_speculative_tokens: NonNegativeInt = 4
    """Tokens proposed per decoding round, from the known answer: same tokens, fewer rounds."""
    fused_optimizer: bool = True
    """Use AdamW's fused kernel."""
    parallel_rewards: bool = True
    """Score completions in a thread pool."""
    num_reward_workers: PositiveInt = 2
    """Threads in the reward pool."""


class MemoryConfig(Group):
    """Less memory for more time. Results stay the same."""

    micro_batch_size: NonNegativeInt = 0
    """Prompts per forward and backward pass; 0: all of them."""
    rollout_batch_size: NonNegativeInt = 0
    """Prompts sampled together, others enter as completions end; 0: all of them."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    offload_reference: bool = False
    """Keep the reference of --kl-coef, and models of rewards, in host memory between steps."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between steps."""


class RunConfig(Group):
    """How long a run is, when it evaluates, and what it saves."""

    max_steps: PositiveInt = 350
    """Steps to train for; the learning rate decays over them."""
    stop_after: NonNegativeInt = 0
    """Stop after this step as if interrupted; the schedule does not change. 0: off."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations; 0: only before and after training."""
    eval_size: PositiveInt = 512
    """Held-out examples per evaluation."""
    eval_samples: PositiveInt = 1
    """Completions sampled per example of an evaluation; above 1 it also has pass@k."""
    save_every: PositiveInt = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed for examples, samples and initial weights."""
    out_dir: Paths = ""
    """The run's folder; empty: runs/<time>-<loss>."""
    resume: Paths = ""
    """auto (go on in --out-dir, if it holds a run), or a run or checkpoint to branch from."""
    track: Literal["none", "wandb", "trackio"] = "none"
    """Also log to Weights & Biases or to Trackio (extras wandb and trackio)."""
    profile: bool = False
    """Write a torch.profiler trace of the 4th to 6th step from the start or the resume."""


class Config(Group):
    """Train with GRPO. --config FILE.toml sets any of these; flags override it."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    speed: SpeedConfig = SpeedConfig()
    memory: MemoryConfig = MemoryConfig()
    run: RunConfig = RunConfig()

    @property
    def supervised(self) -> bool:
        """Whether completions are the true answers, one per prompt."""
        return self.loss.name == "nll"

    def check(self) -> "Config":
        """The config itself. Raises ConfigError for settings that do not go together."""
        loss, sampling = self.loss, self.sampling
        if loss.name not in LOSS_NAMES and ":" not in loss.name:
            raise ConfigError(f"--loss {loss.name}: none of {', '.join(LOSS_NAMES)}, FILE.py:NAME")
        if self.supervised and loss.teacher:
            raise ConfigError("--teacher needs samples of the model, and --loss nll has none")
        teacher_alone = loss.teacher and loss.overlong != "punish" and loss.kl != "k1_reward"
        if sampling.group_size < 2 and not (self.supervised or teacher_alone):
            raise ConfigError("--group-size 1 compares nothing: it is for SFT or a teacher alone")
        if loss.reference and (self.supervised or not loss.kl_coef):
            raise ConfigError("--reference needs a --kl-coef above 0, and samples of the model")
        by_mean = loss.scale == "mean" or (loss.name == "maxrl" and loss.scale == "auto")
        by_mean = by_mean and loss.aggregate == "sum-then-normalize"
        lowest = min([-(loss.overlong == "punish"), *self.task.reward_weights.values()])
        if by_mean and (lowest < 0 or (loss.kl_coef and loss.kl == "k1_reward")):
            causes = "--overlong punish, --kl k1_reward, --reward-weights below 0"
            raise ConfigError(f"--loss maxrl, --scale mean: rewards may not be negative ({causes})")
        if self.run.resume == "auto" and not self.run.out_dir:
            raise ConfigError("--resume auto needs --out-dir, the folder of the run to continue")
        return self

    @classmethod
    def of(cls, **settings: Any) -> "Config":
        """A config from flat settings: `Config.of(group_size=8)`. Raises ConfigError."""
        return settle(settings)[0]

    @classmethod
    def from_toml(cls, path: str | Path) -> "Config":
        """A config from a TOML file, or from a preset by its name. Raises ConfigError."""
        return cls.of(**read_toml(path))

    @classmethod
    def from_cli(cls, argv: Sequence[str], *, prog: str | None = None) -> "Config":
        """A config from flags; one that cannot be ends the process with code 2."""
        return cls.of(**read_flags(argv, prog))

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> "Config":
        """The defaults of this file, then `settings`, by flat name. Raises ConfigError."""
        try:
            config = cls.model_validate(grouped(settings))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{place}: {first['msg']}, got {first['input']!r}") from None
        return config.check()

    def replace(self, **settings: Any) -> "Config":
        """A copy with some settings changed, by flat name. Raises ConfigError."""
        return self.from_flat({**self.flat(), **settings})

    def flat(self) -> dict[str, Any]:
        """Every setting, by flat name."""
        return {name: getattr(getattr(self, g), field) for name, (g, field) in places().items()}


@cache
def places() -> dict[str, tuple[str, str]]:
    """Flat name -> (group, field), in order of declaration."""
    return {
        group if field == "name" else field: (group, field)
        for group, info in Config.model_fields.items()
        for field in info.annotation.model_fields  # type: ignore[union-attr]
    }


def grouped(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by flat name as tables: group -> field -> value. Raises ConfigError."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in Config.model_fields}
    for name, value in settings.items():
        if name not in places():
            raise unknown_setting(name, places())
        group, field = places()[name]
        groups[group][field] = value
    return groups


def hint(name: str) -> str:
    """What is here instead of TRL's `num_generations`, or of `--num-generations`; "" of others."""
    return TRL_WORDS.get(name.lstrip("-").replace("-", "_"), "")


def unknown_setting(name: str, known: Collection[str] = ()) -> ConfigError:
    """The error for a setting that there is not."""
    here = hint(name) or " or ".join(get_close_matches(name, known))
    return ConfigError(f"unknown setting: {name}{here and f'; in minigrpo: {here}'}")


def settle(given: Mapping[str, Any], size: Size | None = None) -> tuple[Config, str]:
    """The config of `given`, and a line about the defaults of the task or the model; "": none.

    `size`: that of a model that is an object; None: of the setting `model`. Raises ConfigError.
    """
    defaults, whose = defaults_for(given, size)
    brought = [f"{name} {value}" for name, value in defaults.items() if name not in given]
    why = f"defaults for {whose}: {', '.join(brought)}" if brought else ""
    return Config.from_flat({**defaults, **given}), why


def read_flags(argv: Sequence[str], prog: str | None = None) -> dict[str, Any]:
    """The settings of --config files and of the other flags; bad ones raise ConfigError or exit."""
    for flag in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if hint(flag):  # of others tyro says what is meant
            raise unknown_setting(flag)
    if {"-h", "--help"} & {*argv}:  # prints the help, and ends the process
        tyro.cli(Config, args=["--help"], prog=prog, config=(tyro.conf.OmitArgPrefixes,))
    # not a Config, which would not know which of its settings were given
    fields = {
        name: get_type_hints(Config.model_fields[group].annotation, include_extras=True)[field]
        for name, (group, field) in places().items()
    }
    fields["config"] = Required[tyro.conf.UseAppendAction[list[str]]]
    parsed: dict[str, Any] = tyro.cli(
        TypedDict("Flags", fields, total=False),  # type: ignore[operator]
        args=argv,
        prog=prog,
    )
    settings: dict[str, Any] = {}
    for path in parsed.pop("config"):
        settings |= read_toml(path)
    return settings | parsed


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file, or of a preset by its name. Raises ConfigError."""
    folders = Path(__file__).parents[:2]  # beside the package in a checkout, inside when built
    presets = {f.stem: f for folder in folders for f in sorted(folder.glob("configs/*.toml"))}
    file = presets.get(str(path), Path(path).expanduser())
    if not file.exists():
        raise ConfigError(f"--config {path}: no such file; presets: {', '.join(presets)}")
    with refusing(f"--config {path}"):
        contents = tomllib.loads(file.read_text("utf-8"))
    contents.pop("versions", None)  # of a run's own config.toml
    settings: dict[str, Any] = {}
    for key, value in contents.items():
        table = value if key in Config.model_fields and isinstance(value, dict) else {key: value}
        # the setting `name` of the table [loss] is `loss`
        settings |= {key if name == "name" else name: x for name, x in table.items()}
    if str(path) in presets and "model" in settings:
        beside = file.parents[1] / settings["model"]
        if beside.exists() and not Path(settings["model"]).exists():
            settings["model"] = str(beside)  # configs/gpt2-small, from another folder
    return settings

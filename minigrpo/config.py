"""Config: every setting of a run, in groups, checked before any work starts.

In Python a setting is `config.sampling.group_size`. Flags, TOML files without tables and
`Config.of(...)` leave the group out: `--group-size 8`, `Config.of(group_size=8)`. The setting
`name` of a group is the flag of the group: `config.loss.name` is `--loss`.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict, get_type_hints

import tyro
from pydantic import ValidationError

from .errors import ConfigError, refusing
from .model.shape import Size
from .settings import SCRATCH, SHIPPED, Settings, places

# word of TRL (GRPOConfig, GRPOTrainer or the command line) -> the setting that replaces it
WORDS = Path(__file__).with_name("trl_words.toml")
TRL_WORDS: Mapping[str, str] = tomllib.loads(WORDS.read_text("utf-8"))
MEDIUM, LARGE, HUGE = 50e6, 300e6, 3e9  # numbers of parameters
MEMORY_SAVING = {"micro_batch_size": 1, "rollout_batch_size": 8, "gradient_checkpointing": True}


class Config(Settings):
    """Train with GRPO. --config FILE.toml sets any of these; flags override it."""

    @property
    def supervised(self) -> bool:
        """Whether completions are the true answers, one per prompt."""
        return self.loss.name == "nll"

    def check(self) -> "Config":
        """Return the config itself. Raises ConfigError for settings that exclude each other."""
        loss = self.loss
        if self.supervised and (loss.teacher or loss.kl_coef or loss.shuffle_rewards):
            others = "--teacher, --kl-coef and --shuffle-rewards"
            raise ConfigError(f"--loss nll has no samples, which {others} need")
        if self.sampling.truncates and loss.sampler_correction.startswith("sequence"):
            raise ConfigError("--top-k, --top-p, --min-p: use --sampler-correction token-truncate")
        if not self.model.lora_rank and (self.model.lora_alpha or self.model.lora_targets):
            raise ConfigError("--lora-alpha and --lora-targets need a --lora-rank")
        if loss.teacher_context and not loss.teacher:
            raise ConfigError("--teacher-context needs a --teacher")
        teaches_alone = loss.teacher and not self.sampling.dynamic_sampling
        if self.sampling.group_size < 2 and not (self.supervised or teaches_alone):
            uses = "--loss nll, or a --teacher without rewards and without --dynamic-sampling"
            raise ConfigError(f"--group-size must be 2 or more, except with {uses}")
        if loss.reference and not loss.kl_coef:
            raise ConfigError("--reference needs a --kl-coef above 0")
        if self.memory.fsdp:
            offloads = self.memory.offload_optimizer or self.memory.offload_reference
            if self.model.lora_rank or offloads or self.speed.amp_dtype == "float16":
                others = "--offload-optimizer, --offload-reference and --amp-dtype float16"
                raise ConfigError(f"--fsdp excludes --lora-rank (its weights fit a card), {others}")
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
    def from_cli(cls, argv: Sequence[str]) -> "Config":
        """A config from flags. Bad ones raise ConfigError, or end the process with code 2."""
        return cls.of(**read_flags(argv))

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> "Config":
        """The defaults of settings.py, changed by `settings` (flat names). Raises ConfigError."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in cls.model_fields}
        for name, value in settings.items():
            if name not in places():
                raise unknown_setting(name)
            group, field = places()[name]
            groups[group][field] = value
        try:
            config = cls.model_validate(groups)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{place}: {first['msg']}, got {first['input']!r}") from None
        return config.check()

    def replace(self, **settings: Any) -> "Config":
        """A copy with some settings changed, by flat name. Raises ConfigError."""
        return self.from_flat({**self.flat(), **settings})

    def flat(self) -> dict[str, Any]:
        return {
            name: getattr(getattr(self, group), field) for name, (group, field) in places().items()
        }


def unknown_setting(name: str) -> ConfigError:
    """The error for an unknown setting, with what a word of TRL is here."""
    here = TRL_WORDS.get(name)
    return ConfigError(f"unknown setting: {name}" + (f"; in minigrpo: {here}" if here else ""))


def settings_for(size: Size, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that fit a published model: docs/models.md says where the values come from."""
    import torch  # it is imported by now, because the model's size has been read

    has_adapters = bool(given.get("lora_rank"))
    settings: dict[str, Any] = {"prompts_per_step": 8, "group_size": 8}
    settings["max_new_tokens"] = min(512, size.context // 2)
    device = given.get("device", "auto")
    has_cuda = torch.cuda.is_available() if device == "auto" else device != "cpu"
    if has_cuda:
        settings["cuda_graphs"] = True
    if size.parameters >= LARGE:
        full_rate = 5e-6
        lora_rate = 5e-5
        if not has_cuda:  # on CUDA they follow from the free memory: see memory.py
            settings |= MEMORY_SAVING
        elif not torch.cuda.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=False
        ):
            settings["use_amp"] = True
    elif size.parameters >= MEDIUM:
        full_rate = 3e-5
        lora_rate = 1e-3
        settings |= {"prompts_per_step": 16, "group_size": 16}
        if not has_cuda:
            settings["micro_batch_size"] = 4
    if size.parameters >= MEDIUM:
        if given.get("loss") == "nll":
            full_rate = 2e-5
            lora_rate = 2e-4
        settings["learning_rate"] = lora_rate if has_adapters else full_rate
    if size.parameters >= HUGE and has_adapters:
        settings["base_dtype"] = "bfloat16"
    return settings


def settle(given: Mapping[str, Any], size: Size | None = None) -> tuple[Config, str]:
    """The config of `given`, and a line about the defaults of the model, or "".

    A published model brings defaults that fit its size. `size` is the size of a model object, or
    None to use the setting `model`. Raises ConfigError.
    """
    recorded = {name for name, value in Config().flat().items() if value is not None}
    if given.keys() >= recorded:  # the settings of a run, whose model may be gone
        return Config.from_flat(given), ""
    model = os.path.expanduser(str(given.get("model", SHIPPED)))
    if size is None and model not in (SHIPPED, SCRATCH):
        from .model.source import ModelSource  # imports torch, for which --help need not wait

        size = ModelSource.of(model).size
    if size is None:
        return Config.from_flat(given), ""
    defaults = settings_for(size, given)
    with_lora = " with LoRA" if given.get("lora_rank") else ""
    whose = f"a model of {size.parameters / 1e6:,.1f} M parameters{with_lora}"
    brought = [f"{name} {value}" for name, value in defaults.items() if name not in given]
    why = f"defaults for {whose}: {', '.join(brought)}" if brought else ""
    return Config.from_flat({**defaults, **given}), why


def read_flags(argv: Sequence[str], prog: str | None = None) -> dict[str, Any]:
    """The settings of --config files and of the other flags. Bad ones raise ConfigError or exit."""
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in TRL_WORDS:  # for other flags tyro suggests a name
            raise unknown_setting(name)
    # A Config would not know which of its settings were given, so tyro makes a dict.
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
    folders = Path(__file__).parents[:2]  # the package if it is installed, or a checkout
    files = [file for folder in folders for file in sorted(folder.glob("configs/*.toml"))]
    presets = {file.stem: file for file in files}
    file = presets.get(str(path), Path(path).expanduser())
    if not file.exists():
        raise ConfigError(f"--config {path}: no such file; presets: {', '.join(presets)}")
    with refusing(f"--config {path}"):
        contents = tomllib.loads(file.read_text("utf-8"))
    contents.pop("versions", None)  # a table of a run's own config.toml
    settings: dict[str, Any] = {}
    for key, value in contents.items():
        if key in Config.model_fields and isinstance(value, dict):
            for name, setting in value.items():
                settings[key if name == "name" else name] = setting  # [loss] name is `loss`
        else:
            settings[key] = value
    if settings.get("tokenizer") == settings.get("model"):
        settings.pop("tokenizer", None)  # it is the model's own, and --model may override that
    return settings

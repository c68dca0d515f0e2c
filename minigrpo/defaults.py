"""The defaults that a task or a model brings, as data; those of all runs are in config.py.

The settings of a task come first, then those that fit a published model, by its size and by which
weights are trained. docs/models.md says where these values come from. This module imports no torch
unless a published model is named, so that `--help` does not wait for it.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import refusing


class TaskRow(NamedTuple):
    """A built-in task. `tasks/base.py` makes it."""

    path: str  # "module:Class" in minigrpo.tasks
    shipped: str = ""  # --model shipped is minigrpo/assets/<shipped>.safetensors; "": refused
    # flat name -> value: settings of every model, and of one that ships or has random weights
    always: Mapping[str, Any] = {}
    small: Mapping[str, Any] = {}


DIALOGUE = {"loss": "dapo", "tokenizer": "dialogue"}

TASKS = {
    "chess-env": TaskRow("chess_env:ChessEnv", "chess"),
    "prompts": TaskRow("prompts:Prompts"),
    "math": TaskRow(
        "math:Math",
        "math",
        small={"max_new_tokens": 32, "learning_rate": 1.5e-4, "max_steps": 200, "eval_every": 50},
    ),
    "countdown": TaskRow(
        "countdown:Countdown",
        "countdown",
        small={"loss": "dapo", "learning_rate": 5e-4, "max_new_tokens": 72, "eval_every": 50},
    ),
    "guess": TaskRow(
        "guess:Guess",
        "guess",
        small={
            **DIALOGUE,
            "prompts_per_step": 31,  # each secret
            "max_new_tokens": 20,
            "learning_rate": 3e-3,
            "num_iterations": 4,
            # With neither of these, some seeds settle on a search that misses three numbers. The
            # start guesses at random, so the KL keeps guesses apart, and keeps them numbers.
            "scale": "mean",
            "kl_coef": 0.003,
            "max_steps": 600,
            "eval_size": 496,
        },
    ),
    "countdown-tool": TaskRow(
        "countdown:CountdownTool",
        "countdown-tool",
        small={
            **DIALOGUE,
            "learning_rate": 1e-3,
            "num_iterations": 2,
            "max_turns": 5,
            "max_new_tokens": 72,
            "max_steps": 500,
        },
    ),
    "code": TaskRow(
        "code:Code",
        "code",
        small={"max_new_tokens": 24, "learning_rate": 1e-3, "max_steps": 250, "eval_every": 50},
    ),
    "calibration": TaskRow(
        "calibration:Calibration",
        "hidden-digit",
        always={"scale": "none"},
        small={
            "max_new_tokens": 32,
            "learning_rate": 1e-3,
            # keeps several confidences in use; without it all questions soon get the same one, and
            # no comparison is left to learn from
            "kl_coef": 0.01,
            "max_steps": 400,
        },
    ),
    "rlt": TaskRow(
        "rlt:RLT",
        "teacher",
        always={"temperature": 0.7},
        small={"max_new_tokens": 24, "learning_rate": 5e-4, "max_steps": 60, "eval_every": 20},
    ),
}

MEDIUM, LARGE, HUGE = 50e6, 300e6, 3e9  # parameters; a smaller model keeps the other defaults
ALL = {"prompts_per_step": 8, "group_size": 8}
MEMORY_SAVING = {"micro_batch_size": 1, "rollout_batch_size": 8, "gradient_checkpointing": True}


class Size(NamedTuple):
    """What is known of a published model before its weights are read."""

    parameters: int
    context: int

    @classmethod
    def of(cls, model: Any) -> "Size":
        """That of a Transformer."""
        return cls(sum(x.numel() for x in model.parameters()), model.shape.context)


def size_of(model: str) -> Size | None:
    """That of a published model; None if it ships, is random, or is a run that began with such.

    Raises ConfigError if it cannot be read: with defaults of another size it would not learn.
    """
    if model in ("shipped", "scratch"):
        return None
    path = Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    with refusing(f"--model {model}"):
        if (record := folder / "config.toml").is_file():  # a run, or its model.safetensors
            return size_of(tomllib.loads(record.read_text("utf-8"))["model"]["name"])
        if path.is_dir() and not any(folder.glob("*.safetensors")):
            return None
        # these import torch, which --help must not wait for
        from .model.hf import base_of, hub_folder, read_model_shape
        from .model.transformer import Transformer

        found = hub_folder(path, weights=False)
        found.stat()  # an error if nothing is there
        if base := base_of(found):
            return size_of(base)
        return Size.of(Transformer(read_model_shape(found), seed=None))


def settings_for(size: Size, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that fit a published model, by flat name, to those that are given."""
    has_adapters = bool(given.get("lora_rank"))
    settings: dict[str, Any] = {**ALL, "max_new_tokens": min(512, size.context // 2)}
    if size.parameters >= MEDIUM:
        of_all, of_adapters = (1e-6, 1e-5) if size.parameters >= LARGE else (1e-5, 1e-4)
        if given.get("loss") == "nll":
            of_all, of_adapters = 2e-5, 2e-4
        settings["learning_rate"] = of_adapters if has_adapters else of_all
    if size.parameters >= LARGE:
        settings |= MEMORY_SAVING
        if has_bfloat16(given.get("device", "auto")):
            settings["use_amp"] = True
    if size.parameters >= HUGE and has_adapters:
        settings["base_dtype"] = "bfloat16"
    return settings


def has_bfloat16(device: str) -> bool:
    """Whether --device stands for a CUDA device that computes in bfloat16."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return False
    return torch.cuda.is_bf16_supported(including_emulation=False)


# all settings that a task or a model may bring
BROUGHT = {name for row in TASKS.values() for name in (*row.always, *row.small)}
BROUGHT |= {*ALL, *MEMORY_SAVING, "max_new_tokens", "learning_rate", "use_amp", "base_dtype"}


def defaults_for(given: Mapping[str, Any], size: Size | None = None) -> dict[str, tuple[Any, str]]:
    """The defaults that the task and the model bring, and what brings each: see `config.settle`."""
    if given.keys() >= BROUGHT:
        return {}  # the settings of a run, whose model may be gone, and need not be read
    task = given.get("task", "auto")
    row = TASKS.get(task, TaskRow(""))
    size = size or size_of(str(given.get("model", "shipped")))
    of_task = row.always if size else {**row.always, **row.small}
    brought = {name: (value, f"--task {task}") for name, value in of_task.items()}
    if size:
        with_lora = " with LoRA" if given.get("lora_rank") else ""
        why = f"a model of {size.parameters / 1e6:,.1f} M parameters{with_lora}"
        brought |= {name: (value, why) for name, value in settings_for(size, given).items()}
    return brought

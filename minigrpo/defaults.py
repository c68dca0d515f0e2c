"""The defaults that a task or a model brings; those of all runs are in config.py.

A published model brings the settings that fit its size and the weights that are trained, any other
those of the task (tasks/tasks.toml). docs/models.md says where these values come from. This module
imports no torch unless a published model is named, so that `--help` does not wait for it.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import refusing


class TaskRow(NamedTuple):
    """A built-in task: see tasks/tasks.toml. `tasks/base.py` makes it."""

    path: str
    shipped: str = ""
    small: Mapping[str, Any] = {}


TABLE = Path(__file__).with_name("tasks") / "tasks.toml"
TASKS = {name: TaskRow(**row) for name, row in tomllib.loads(TABLE.read_text("utf-8")).items()}

MEDIUM, LARGE, HUGE = 50e6, 300e6, 3e9  # parameters; a smaller model keeps the other defaults
ALL = {"prompts_per_step": 8, "group_size": 8}
MEMORY_SAVING = {"micro_batch_size": 1, "rollout_batch_size": 8, "gradient_checkpointing": True}


class Size(NamedTuple):
    """What is known of a published model before its weights are read."""

    parameters: int
    context: int

    @classmethod
    def of(cls, model: Any) -> "Size":
        """The size of a Transformer."""
        return cls(sum(x.numel() for x in model.parameters()), model.shape.context)


def size_of(model: str) -> Size | None:
    """The size of a published model; None if it ships, is random, or is a run that began with such.

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
        from .model.hf import lineage, read_model_shape
        from .model.transformer import Transformer

        *adapters, (name, found) = lineage(str(path))
        if adapters:
            return size_of(name)
        found.stat()  # an error if nothing is there
        return Size.of(Transformer(read_model_shape(found), seed=None))


def settings_for(size: Size, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that fit a published model, by flat name, to those that are given."""
    import torch  # imported by now: the model's size has been read

    has_adapters = bool(given.get("lora_rank"))
    settings: dict[str, Any] = {**ALL, "max_new_tokens": min(512, size.context // 2)}
    has_cuda = given.get("device") != "cpu" and torch.cuda.is_available()
    if has_cuda:
        settings["cuda_graphs"] = True
    if size.parameters >= LARGE:
        of_all, of_adapters = 5e-6, 5e-5
        settings |= MEMORY_SAVING
        if has_cuda and torch.cuda.is_bf16_supported(including_emulation=False):
            settings["use_amp"] = True
    elif size.parameters >= MEDIUM:
        of_all, of_adapters = 3e-5, 1e-3
        settings |= {"prompts_per_step": 16, "group_size": 16}
        settings["micro_batch_size"] = 1 if has_cuda else 4
    if size.parameters >= MEDIUM:
        if given.get("loss") == "nll":
            of_all, of_adapters = 2e-5, 2e-4
        settings["learning_rate"] = of_adapters if has_adapters else of_all
    if size.parameters >= HUGE and has_adapters:
        settings["base_dtype"] = "bfloat16"
    return settings


# all settings that a task or a model may bring
BROUGHT = {name for row in TASKS.values() for name in row.small}
BROUGHT |= {*ALL, *MEMORY_SAVING, "max_new_tokens", "learning_rate", "base_dtype"}
BROUGHT |= {"use_amp", "cuda_graphs"}


def defaults_for(given: Mapping[str, Any], size: Size | None) -> tuple[Mapping[str, Any], str]:
    """The defaults that the task or the model brings, and which of them: see `config.settle`."""
    if given.keys() >= BROUGHT:
        return {}, ""  # the settings of a run, whose model may be gone, and need not be read
    task = given.get("task", "auto")
    row = TASKS.get(task, TaskRow(""))
    size = size or size_of(str(given.get("model", "shipped")))
    if size is None:
        return row.small, f"--task {task}"
    with_lora = " with LoRA" if given.get("lora_rank") else ""
    model = f"a model of {size.parameters / 1e6:,.1f} M parameters{with_lora}"
    return settings_for(size, given), model

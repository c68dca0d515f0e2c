"""The model of a run, of a file or on the Hugging Face Hub, by its path or name."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..model.hub import local_folder
from ..model.lora import PEFT_CONFIG, load_trained
from ..model.transformer import Transformer
from ..model.weight_files import INDEX, WEIGHTS, other_format
from ..tasks.registry import shipped_model
from .base_model import BaseError, adapted_model
from .checkpoint import CheckpointError, State, checkpoints, load_checkpoint
from .flags import ConfigError
from .saved_state import shape_of
from .settings import RECORD, is_run
from .text import printable

SHIPPED = "shipped"  # a model that comes with the package
LEFT_BY_A_RUN = ("metrics.jsonl", "checkpoints")


def load_model(
    path: Path,
    warn: Callable[[str], object],
    matrices: torch.dtype | None = None,
    *,
    task: str = "chess-env",
) -> tuple[str, Transformer]:
    """The model of a run, of a file or folder, ORG/NAME, or `shipped`, and where it comes from.

    Of a file, `matrices` is the type of weights with two dimensions; None: float32. `task` is the
    one whose model `shipped` means. Raises ValueError in one line.
    """
    if str(path) == SHIPPED:
        return SHIPPED, Transformer.from_pretrained(shipped_model(task), matrices)
    if is_run(path):
        return _newest(path, warn)
    if any((path / name).exists() for name in LEFT_BY_A_RUN):
        raise ConfigError(
            f"{path}: is a run without its {RECORD}, so its task and tokenizer are not known; "
            f"{path / WEIGHTS}, if there is one, is its model alone"
        )
    found = local_folder(str(path))
    if found.is_dir() and not any((found / name).exists() for name in (WEIGHTS, INDEX)):
        held = other_format(found)
        raise ConfigError(
            f"{path}: neither a run (no config.toml) nor a model (no {WEIGHTS}){held}"
        )
    if (found / WEIGHTS).exists() and (found / PEFT_CONFIG).exists():
        raise ConfigError(
            f"{path}: has adapters ({PEFT_CONFIG}) beside its weights, which would be left out; "
            "merge them into the weights, or move them away"
        )
    return str(path), Transformer.from_pretrained(str(found), matrices)


def _model_of(state: State, warn: Callable[[str], object]) -> Transformer:
    """The model in a checkpoint. Raises an error of some kind for a state of another version."""
    if state["config"].get("lora_rank"):
        task = state["config"].get("task", "chess-env")
        return adapted_model(state, lambda base, dtype: load_model(base, warn, dtype, task=task)[1])
    shape, found = shape_of(state), sum(x.numel() for x in state["model"].values())
    if shape.num_parameters != found:
        raise ValueError(f"a model of this shape has {shape.num_parameters} weights, not {found}")
    model = Transformer.empty(shape)
    load_trained(model, state["model"])
    return model


def _newest(folder: Path, warn: Callable[[str], object]) -> tuple[str, Transformer]:
    """A run's newest whole checkpoint, else its model.safetensors.

    A damaged checkpoint is skipped with a warning that names it.
    """
    found = checkpoints(folder / "checkpoints")
    for path in found[::-1]:
        try:
            state = load_checkpoint(path)
        except CheckpointError as error:
            warn(f"{error}; trying an older one")
            continue
        try:
            return str(path), _model_of(state, warn)
        except BaseError as error:  # an older checkpoint has the same base
            raise ConfigError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = printable(str(error))[:200]
            warn(f"{path}: is not a checkpoint of this version ({reason}); trying an older one")
    if checkpoints(folder / "checkpoints") != found:  # the run goes on, and has replaced them
        return _newest(folder, warn)
    if (folder / WEIGHTS).exists():
        return str(folder / WEIGHTS), Transformer.from_pretrained(folder / WEIGHTS)
    raise ConfigError(f"{folder}: a run without a whole checkpoint, and without {WEIGHTS}")

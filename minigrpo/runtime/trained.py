"""The model of a run, of a file or on the Hugging Face Hub, by its path or name."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..model.hub import local_folder
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS, load_trained
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
    name: str,
    warn: Callable[[str], object],
    matrices: torch.dtype | None = None,
    *,
    task: str = "chess-env",
) -> tuple[str, Transformer]:
    """The model of a run, of a file or folder, ORG/NAME, or `shipped`, and where it comes from.

    Args:
        name: as the user typed it: a Path would make ORG/NAME of ./ORG/NAME.
        matrices: of a file, the type of weights with two dimensions; None: float32.
        task: whose model `shipped` means.

    Raises ValueError in one line.
    """
    if not str(name).strip():
        raise ConfigError("the model must be shipped, a run, a path or ORG/NAME, got nothing")
    if str(name) == SHIPPED:
        return SHIPPED, Transformer.from_pretrained(shipped_model(task), matrices)
    path = Path(name)
    if is_run(path):
        return _newest(path, warn)
    if any((path / file).exists() for file in LEFT_BY_A_RUN):
        raise ConfigError(
            f"{name}: is a run without its {RECORD}, so its task and tokenizer are not known; "
            f"{path / WEIGHTS}, if there is one, is its model alone"
        )
    found = local_folder(name)
    whole = any((found / file).exists() for file in (WEIGHTS, INDEX))
    if found.is_dir() and not whole:
        held = other_format(found)
        raise ConfigError(
            f"{name}: neither a run (no config.toml) nor a model (no {WEIGHTS}){held}"
        )
    left_out = [file for file in (PEFT_CONFIG, PEFT_WEIGHTS) if (found / file).exists()]
    if whole and left_out:
        raise ConfigError(
            f"{name}: has adapters ({left_out[0]}) beside its weights, which would be left out; "
            "merge them into the weights, or move them away"
        )
    return str(name), Transformer.from_pretrained(str(found), matrices)


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

"""The model of a run, of a file or on the Hugging Face Hub, by its path or name."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..model.hub import local_folder
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS
from ..model.pretrained import load_pretrained
from ..model.shape import ModelShape
from ..model.transformer import Transformer
from ..model.weight_files import INDEX, WEIGHTS, other_format
from .base_model import BaseError, adapted_model
from .checkpoint import CheckpointError, State, checkpoints, load_checkpoint
from .flags import ConfigError
from .settings import is_run
from .text import printable


def load_model(
    name: str, warn: Callable[[str], object], matrices: torch.dtype | None = None
) -> tuple[str, Transformer]:
    """The model of a run, of a file or folder, ORG/NAME, or `shipped`, and where it comes from.

    Args:
        name: as the user typed it: a Path would make ORG/NAME of ./ORG/NAME.
        matrices: of a file, the type of weights with two dimensions; None: float32.

    Raises ValueError in one line.
    """
    if not str(name).strip():
        raise ConfigError("the model must be shipped, a run, a path or ORG/NAME, got nothing")
    if is_run(Path(name)):
        return _newest(Path(name), warn)
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
    model = load_pretrained if str(name) == "shipped" else Transformer.from_pretrained
    return str(name), model(str(found), matrices)


def _model_of(state: State, warn: Callable[[str], object]) -> Transformer:
    """The model in a checkpoint. Raises an error of some kind for a state of another version."""
    if state["config"].get("lora_rank"):
        return adapted_model(state, lambda base, dtype: load_model(base, warn, dtype)[1])
    model = Transformer.empty(ModelShape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model


def _newest(folder: Path, warn: Callable[[str], object]) -> tuple[str, Transformer]:
    """A run's newest whole checkpoint, else its model.safetensors.

    A damaged checkpoint is skipped with a warning that names it.
    """
    for path in checkpoints(folder / "checkpoints")[::-1]:
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
    if (folder / WEIGHTS).exists():
        return str(folder / WEIGHTS), Transformer.from_pretrained(folder / WEIGHTS)
    raise ConfigError(f"{folder}: a run without a whole checkpoint, and without {WEIGHTS}")

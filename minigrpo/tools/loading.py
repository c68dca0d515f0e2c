"""What the tools share: load the model of a run or a file, with its task and a sampler."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config import Config
from ..model.pretrained import load_pretrained
from ..model.shape import ModelShape
from ..model.tokenizer import load_tokenizer
from ..model.transformer import Transformer
from ..model.weight_files import WEIGHTS
from ..runtime import accel
from ..runtime.build import match_vocab
from ..runtime.checkpoint import CheckpointError, State, checkpoints, load_checkpoint
from ..runtime.flags import ConfigError, flag
from ..runtime.logging import Screen
from ..runtime.settings import places, read_settings
from ..runtime.text import check_file_name, printable
from ..sampling.sampler import Sampler
from ..tasks.registry import load_task
from ..types import Task


@dataclass(frozen=True)
class ModelSelection:
    """The model to load, and settings that override those of its run.

    A setting that is None keeps the run's value, or the default where there is no run.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    tokenizer: str | None = None
    """chess, gpt2 or a path."""
    task: str | None = None
    """As for minigrpo train."""
    data: str | None = None
    """Files of questions, as for minigrpo train."""
    history: int | None = None
    """Number of earlier moves in a chess prompt."""
    max_new_tokens: int | None = None
    """Longest completion in tokens, end of text included."""
    seed: int | None = None
    """Seed of the held-out examples and the samples."""
    device: str = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class Loaded:
    """A model, ready to sample from."""

    name: str  # the file or checkpoint of the weights
    config: Config
    task: Task
    sampler: Sampler


def load(selection: ModelSelection, screen: Screen) -> Loaded:
    """Load the model, its tokenizer and its task.

    Raises ValueError in one line that names the file or the flag.
    """
    check_file_name(selection.run)
    config = config_of(selection)
    check_paths(selection, config)
    tokenizer = load_tokenizer(config.model.tokenizer)
    task = load_task(
        config.task.name,
        seed=config.run.seed,
        history=config.task.history,
        data=config.task.data,
        listener=screen,
    )
    name, model = load_model(selection.run, screen.warn)
    match_vocab(model, name, config, tokenizer, screen.warn)
    model = model.to(accel.pick_device(config.speed.device, 0)).eval()
    return Loaded(name, config, task, Sampler(config, model, tokenizer))


def config_of(selection: ModelSelection) -> Config:
    """The run's config, or the defaults, with the settings of `selection` that are not None."""
    settings: dict[str, Any] = {}
    if is_run(selection.run):
        settings = read_settings(Config, selection.run / "config.toml")
    known = places(Config)
    asked = {name: x for name, x in asdict(selection).items() if name in known and x is not None}
    return Config.of(**{**settings, **asked})


def check_paths(selection: ModelSelection, config: Config) -> None:
    """Raise ConfigError for a path in a run's config that is not found from this folder.

    A run's relative paths begin where training began.
    """
    if not is_run(selection.run):
        return
    task = config.task
    files = {"data": task.data.split(","), "rewards": [task.rewards]}
    files["task"] = [task.name] if task.name.endswith(".py") else []
    for name, paths in files.items():
        for path in filter(None, (path.strip() for path in paths)):
            if getattr(selection, name, None) is None and not os.path.lexists(path):
                raise ConfigError(
                    f"{flag(name)} {path}: not found; the paths of a run are relative to the "
                    "folder where training began, so start this command there"
                )


def is_run(path: Path) -> bool:
    """Whether this is a run's folder."""
    return (path / "config.toml").is_file()


def load_model(path: Path, warn: Callable[[str], object]) -> tuple[str, Transformer]:
    """The model of a run, of a file, or `shipped`, with the name of its weights.

    Raises ValueError in one line.
    """
    if is_run(path):
        return _newest(path, warn)
    if path.is_dir() and not (path / WEIGHTS).exists():
        raise ConfigError(f"{path}: neither a run (no config.toml) nor a model (no {WEIGHTS})")
    return str(path), load_pretrained(str(path))


def _model_of(state: State) -> Transformer:
    """The model in a checkpoint. Raises an error of some kind for a state of another version."""
    model = Transformer(ModelShape(**state["shape"]))
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
            return str(path), _model_of(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = printable(str(error))[:200]
            warn(f"{path}: is not a checkpoint of this version ({reason}); trying an older one")
    if (folder / WEIGHTS).exists():
        return str(folder / WEIGHTS), Transformer.from_pretrained(folder / WEIGHTS)
    raise ConfigError(f"{folder}: a run without a whole checkpoint, and without {WEIGHTS}")

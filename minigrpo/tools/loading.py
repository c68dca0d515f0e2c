"""What the tools share: load the model of a run or a file, with its task and a sampler."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config import Config
from ..model.tokenizer import load_tokenizer
from ..runtime import accel
from ..runtime.build import match_vocab
from ..runtime.flags import ConfigError, flag
from ..runtime.logging import Screen
from ..runtime.settings import places, read_settings
from ..runtime.text import check_file_name
from ..runtime.trained import is_run, load_model
from ..sampling.sampler import Sampler
from ..tasks.registry import load_task
from ..types import Task


@dataclass(frozen=True)
class ModelSelection:
    """The model to load, and settings that override those of its run.

    A setting that is None keeps the run's value, or the default where there is no run.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    tokenizer: str | None = None
    """chess, gpt2, a path or ORG/NAME."""
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

"""What the tools share: load the model of a run or a file, with its task and a sampler."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config import Config
from ..model.hub import local_folder
from ..model.tokenizer import Tokenizer
from ..runtime import accel
from ..runtime.build import make_task, make_tokenizer, match_vocab
from ..runtime.flags import ConfigError, flag
from ..runtime.logging import Screen
from ..runtime.origins import check_tokenizer_of_run, other_files
from ..runtime.outputs import check_is_not_read
from ..runtime.resume import contents_of_files
from ..runtime.settings import is_run, places, read_record
from ..runtime.text import check_file_name
from ..runtime.tokenizers import is_path, warn_of_other_tokenizer, with_own_tokenizer
from ..runtime.trained import load_model
from ..sampling.sampler import Sampler
from ..types import Task


@dataclass(frozen=True)
class ModelSelection:
    """The model to load, and settings that override those of its run.

    A setting that is None, or off, keeps the run's value, or the default where there is no run.
    """

    run: Annotated[str, tyro.conf.Positional]  # no Path, which would lose its ./
    """A run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    tokenizer: str | None = None
    """auto (that of the model, else chess), chess, gpt2, a folder or file, or ORG/NAME."""
    chat_template: str | None = None
    """A jinja2 file, as for minigrpo train."""
    system: str | None = None
    """A system message, as for minigrpo train."""
    task: str | None = None
    """As for minigrpo train."""
    data: str | None = None
    """Files of questions, as for minigrpo train."""
    confidence: bool = False
    """As for minigrpo train; a run that was trained with it has it."""
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
    asked: dict[str, str] = field(default_factory=dict)  # digests of models that rewards asked


def load(selection: ModelSelection, screen: Screen) -> Loaded:
    """Load the model, its tokenizer and its task.

    Raises ValueError in one line that names the file or the flag.
    """
    check_file_name(selection.run)
    config = config_of(selection)
    check_paths(selection, config)
    warn_of_other_files(selection, contents_of_files(config), screen)
    tokenizer = tokenizer_of(selection, config)
    task = make_task(config, screen)
    name, sampler = load_sampler(selection, config, tokenizer, screen)
    return Loaded(name, config, task, sampler)


def warn_of_other_files(
    selection: ModelSelection, digests: Mapping[str, str], screen: Screen
) -> None:
    """Say which files, or models that rewards asked, differ from those of the run."""
    if is_run(run := Path(selection.run)) and (said := other_files(run, digests)):
        screen.warn(said)


def tokenizer_of(selection: ModelSelection, config: Config) -> Tokenizer:
    """The tokenizer of the selected model, unless --tokenizer names another. Raises ValueError."""
    local_folder(selection.run)  # a model that is nowhere is named as such, not its tokenizer
    tokenizer = make_tokenizer(with_own_tokenizer(config, selection.run))
    if is_run(run := Path(selection.run)):
        given = selection.chat_template is not None or selection.system is not None
        check_tokenizer_of_run(run, tokenizer, own_template=given)
    return tokenizer


def load_sampler(
    selection: ModelSelection, config: Config, tokenizer: Tokenizer, screen: Screen
) -> tuple[str, Sampler]:
    """The selected model, ready to sample from, and the name of its weights. Raises ValueError."""
    name, model = load_model(selection.run, screen.warn, task=config.task.name)
    match_vocab(model, name, config, tokenizer, screen.warn)
    warn_of_other_tokenizer(selection.run, tokenizer, screen.warn)
    model = model.to(accel.pick_device(config.speed.device, 0)).eval()
    return name, Sampler(config, model, tokenizer)


def config_of(selection: ModelSelection) -> Config:
    """The run's config, or the defaults, with the settings of `selection` that are not None."""
    settings: dict[str, Any] = {}
    if is_run(run := Path(selection.run)):
        settings = read_record(Config, run)
    known = places(Config)
    given = {name: x for name, x in asdict(selection).items() if x is not None and x is not False}
    asked = {name: x for name, x in given.items() if name in known}
    return Config.of(**{**settings, **asked})


def check_paths(selection: ModelSelection, config: Config) -> None:
    """Raise ConfigError for a path in a run's config that is not found from this folder.

    A run's relative paths begin where training began.
    """
    task = config.task
    files = {"data": task.data.split(","), "rewards": [task.rewards]}
    files["student"] = [task.student] if is_path(task.student) and task.student != "shipped" else []
    files["task"] = [task.name] if task.name.endswith(".py") else []
    check_model_paths(selection, config)
    _check(selection, files)


def check_model_paths(selection: ModelSelection, config: Config) -> None:
    """`check_paths` for the files of the tokenizer alone."""
    model = config.model
    named = [model.tokenizer] if is_path(model.tokenizer) else []
    _check(selection, {"tokenizer": named, "chat_template": [model.chat_template]})


def check_is_no_input(name: str, path: Path, selection: ModelSelection) -> None:
    """Raise ConfigError if a file to write is one that the command reads, and would be lost.

    `name` is the flag of the file to write.
    """
    settings = config_of(selection).flat()
    check_is_not_read(name, path, [selection.run, *inputs_of(settings)])


def inputs_of(settings: Mapping[str, Any]) -> list[str]:
    """The files that a run with these flat settings reads, among names of other things."""
    named = ("rewards", "task", "student", "init_from", "tokenizer", "chat_template")
    return [*settings["data"].split(","), *(settings[name] for name in named)]


def _check(selection: ModelSelection, files: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a path, by its setting, that is the run's own and is not found."""
    if not is_run(Path(selection.run)):
        return
    for name, paths in files.items():
        for path in filter(None, (path.strip() for path in paths)):
            if getattr(selection, name, None) is None and not os.path.lexists(path):
                raise ConfigError(
                    f"{flag(name)} {path}: not found; the paths of a run are relative to the "
                    "folder where training began, so start this command there"
                )

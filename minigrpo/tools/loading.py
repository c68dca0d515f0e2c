"""What the tools share: from a run's folder, or a model's, to something that answers questions."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config import Config
from ..model.pretrained import load_pretrained
from ..model.tokenizer import load_tokenizer
from ..model.transformer import ModelShape, Transformer
from ..model.weights import WEIGHTS
from ..runtime import accel
from ..runtime.build import match_vocab
from ..runtime.checkpoint import CheckpointError, checkpoints, load_checkpoint
from ..runtime.flags import ConfigError
from ..runtime.logging import Screen
from ..runtime.settings import places, read_settings
from ..sampling.sampler import Sampler
from ..tasks.registry import load_task
from ..types import Task


@dataclass(frozen=True)
class ModelSelection:
    """A model to be used; None leaves a setting as the run had it, and as it is by default where
    there is no run.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    tokenizer: str | None = None
    """chess, gpt2 or a path."""
    task: str | None = None
    """As for train.py."""
    data: str | None = None
    """Files of questions, as for train.py."""
    history: int | None = None
    """How many earlier moves the prompt tells."""
    max_new_tokens: int | None = None
    """Longest completion, end of text included."""
    seed: int | None = None
    """Of the held-out examples and of what is sampled."""
    device: str = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class Loaded:
    """A model that can be asked."""

    name: str  # which weights these are
    config: Config
    task: Task
    sampler: Sampler


def load(which: ModelSelection, screen: Screen) -> Loaded:
    """Raises ValueError in one line that names the file or the flag."""
    config = config_of(which)
    tokenizer = load_tokenizer(config.model.tokenizer)
    task = load_task(
        config.task.name,
        seed=config.run.seed,
        history=config.task.history,
        data=config.task.data,
        listener=screen,
    )
    name, model = load_model(which.run, screen.warn)
    match_vocab(model, name, config, tokenizer, screen.warn)
    model = model.to(accel.pick_device(config.speed.device, 0)).eval()
    return Loaded(name, config, task, Sampler(config, model, tokenizer))


def config_of(which: ModelSelection) -> Config:
    """The run's config, or the defaults, with what was asked for."""
    values: dict[str, Any] = (
        read_settings(Config, which.run / "config.toml") if is_run(which.run) else {}
    )
    known = places(Config)
    return Config.of(
        **{
            **values,
            **{name: x for name, x in asdict(which).items() if name in known and x is not None},
        }
    )


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def load_model(path: Path, warn: Callable[[str], object]) -> tuple[str, Transformer]:
    """A run's model, or one by path or name, and which weights it has. Raises ValueError."""
    return _newest(path, warn) if is_run(path) else (str(path), load_pretrained(str(path)))


def _newest(folder: Path, warn: Callable[[str], object]) -> tuple[str, Transformer]:
    """The newest checkpoint of a run that is whole, else its model.safetensors; a damaged one is
    named through `warn`.
    """
    for path in checkpoints(folder / "checkpoints")[::-1]:
        try:
            state = load_checkpoint(path)
        except CheckpointError as error:
            warn(f"{error}; trying what there is before it")
            continue
        if "shape" in state:
            model = Transformer(ModelShape(**state["shape"]))
            model.load_state_dict(state["model"])
            return str(path), model
    if (folder / WEIGHTS).exists():
        return str(folder / WEIGHTS), Transformer.from_pretrained(folder / WEIGHTS)
    raise ConfigError(f"{folder}: a run without a whole checkpoint, and without {WEIGHTS}")

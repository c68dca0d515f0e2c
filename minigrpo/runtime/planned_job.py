"""What a plan knows of a run: its device, its model's shape, and what it has to assume.

Weights are not read where the shape is known without them: from config.json, or for a published
model that is not here from the table in published.py. Where model or data are not here, lengths are
assumed and said.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import Config
from ..model.architectures import shape_from_scratch
from ..model.families import read_shape
from ..model.hub import cached_folder
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer, load_tokenizer
from ..model.transformer import Transformer
from ..model.weight_files import CONFIG, INDEX, WEIGHTS, WeightFiles
from ..rewards import RewardScorer
from ..types import Task
from .build import check_room, make_model, make_scorer, make_task, make_tokenizer, match_vocab
from .combinations import check_shares
from .distributed import DistContext
from .estimate import (
    ASSUMED_PROMPT,
    Estimate,
    assume_lengths_and_estimate,
    measure_lengths_and_estimate,
)
from .examples import check_examples
from .flags import ConfigError
from .published import published_shape
from .settings import is_run
from .startup import check_machine


@dataclass(frozen=True)
class PlannedJob:
    """A run as far as a plan needs it."""

    device: torch.device
    is_here: bool  # whether this machine has the device
    shape: ModelShape
    tokenizer: Tokenizer  # the shipped one stands in for that of a model that is not here
    task: Task | None  # None if model or data are not here
    scorer: RewardScorer | None
    model: Transformer | None  # if its weights had to be read
    worst: Estimate  # if completions share nothing
    assumed: str = ""  # a sentence

    @classmethod
    def of(cls, config: Config, dist: DistContext) -> "PlannedJob":
        """Raises ValueError in one line for whatever the run would not start with.

        A published model and data that are not here are no error.
        """
        device, is_here = _device(config, dist)
        if shape := _published(config):
            check_room(config, shape)
            tokenizer, model = load_tokenizer("chess"), None
            missing = f"--init-from {config.model.init_from} is not here (its shape is published)"
        else:
            tokenizer = make_tokenizer(config)
            shape, model = _shape(config, tokenizer)
            missing = _missing_data(config)
        if missing:
            worst = assume_lengths_and_estimate(config, shape, device.type, dist.world_size)
            lengths = (
                f"prompts of {ASSUMED_PROMPT} tokens, completions of --max-new-tokens "
                f"{config.sampling.max_new_tokens}"
            )
            assumed = f"{missing}; assumed: {lengths}"
            return cls(device, is_here, shape, tokenizer, None, None, model, worst, assumed)
        task = make_task(config)
        scorer = make_scorer(config, task)
        check_examples(config, task, tokenizer, shape.context, lambda text: None)
        worst = measure_lengths_and_estimate(
            config, shape, task, tokenizer, device.type, dist.world_size
        )
        return cls(device, is_here, shape, tokenizer, task, scorer, model, worst)


def _device(config: Config, dist: DistContext) -> tuple[torch.device, bool]:
    """The device, and whether it is here. `--device cuda` may be planned for anywhere."""
    if config.speed.device == "cuda" and not torch.cuda.is_available():
        check_shares(config, dist.world_size)
        return torch.device("cuda"), False
    return check_machine(config, dist), True


def _published(config: Config) -> ModelShape | None:
    """The shape of a published model that is not here."""
    name = config.model.init_from
    return None if (_place(name) / CONFIG).exists() else published_shape(name)


def _place(name: str) -> Path:
    """Where a model is on this machine, if anywhere; nothing is fetched for a plan."""
    return cached_folder(name) or Path(name)


def _missing_data(config: Config) -> str:
    paths = filter(None, (path.strip() for path in config.task.data.split(",")))
    missing = [path for path in paths if not Path(path).exists()]
    return f"--data {', '.join(missing)}: not here" if missing else ""


def _shape(config: Config, tokenizer: Tokenizer) -> tuple[ModelShape, Transformer | None]:
    """The shape of a run's model, and the model if its weights had to be read."""
    sizes = config.model
    if sizes.init_from == "scratch":
        shape = shape_from_scratch(sizes, tokenizer.n_vocab)
        check_room(config, shape)
        return shape, None
    path = _place(sizes.init_from)
    has_weights = path.is_file() or any((path / name).is_file() for name in (WEIGHTS, INDEX))
    by_path = sizes.init_from not in ("", "shipped") and has_weights and not is_run(path)
    if not by_path:  # make_model also says what is wrong with something that is no model
        model = make_model(config, tokenizer)
        return model.shape, model
    try:
        shape, problems = read_shape(WeightFiles.open(path))
        if problems:
            raise ValueError(f"{path}: does not fit this model: {'; '.join(problems)}")
    except ValueError as error:
        raise ConfigError(f"--init-from {error}") from None
    empty = Transformer.empty(shape, device="meta")
    match_vocab(empty, f"--init-from {path}", config, tokenizer)
    return empty.shape, None

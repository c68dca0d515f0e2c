"""What evaluate, sample and export share: the arguments that name a model, and its parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ..config import Config, Group, Paths, read_flags, read_toml
from ..parts import Given, Parts, load_model_of_run
from ..resolve import resolve
from ..run.console import Console
from ..run.run_dir import RECORD
from ..runtime.device import pick_device, set_up_process


class ModelArguments(Group):
    """What the commands on a model have in common."""

    run: Annotated[Paths, tyro.conf.Positional]
    """First: a run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    data: Paths = ""
    """Files of questions; all of them are held out."""


Arguments = TypeVar("Arguments", bound=ModelArguments)


def parse(
    kind: type[Arguments], argv: Sequence[str], prog: str, about: str | None = None
) -> tuple[Arguments, dict[str, Any]]:
    """The command's own flags, and the settings that the other flags give."""
    arguments, flags = tyro.cli(
        kind, args=argv, prog=prog, description=about, return_unknown_args=True
    )
    return arguments, read_flags(flags, prog)


def config_of(arguments: ModelArguments, given: Mapping[str, Any]) -> Config:
    """The settings of the run, or the defaults, with those that are given. Raises ConfigError."""
    record = Path(arguments.run) / RECORD
    settings = read_toml(record) if record.is_file() else {}
    # a run's adapters are loaded with it; it may be of another machine
    settings |= {"model": arguments.run, "lora_rank": 0, "device": "auto"}
    if arguments.data:
        settings |= {"data": "", "eval_data": arguments.data}
    return resolve(Config.of(**{**settings, **given}), models=["model"])


def open_parts(config: Config, console: Console) -> Parts:
    """The parts of a config, on its device; adapters of a run stay apart, as in its training."""
    device = pick_device(config.speed.device)
    set_up_process(config.speed, device)
    run = Path(config.model.name)
    as_trained = (run / RECORD).is_file() and not config.model.lora_rank
    model = load_model_of_run(run, console) if as_trained else None
    return Parts(config, device, console, Given(model=model))

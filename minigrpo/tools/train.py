"""Train a model: `minigrpo train [flags]`, or `python train.py [flags]` in a checkout.

Several processes: `torchrun --nproc_per_node=2 distributed_train.py [flags]`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..config import read_flags, settle
from ..run.reading import read_run
from ..runtime.distributed import DistContext
from ..trainer import Trainer
from ..types import ConfigError
from .doctor import print_findings


def fit(trainer: Trainer, why: str) -> Mapping[str, Any]:
    """Train, and print what the doctor finds; return the contents of summary.json.

    `why` says what brought the defaults: see `config.settle`.
    """
    console = trainer.console
    if why:
        console.say(why)
    summary = trainer.fit()
    if trainer.dist.is_main:
        with suppress(ConfigError):  # a full disk may have left no metrics
            print_findings(console, read_run(trainer.run_dir.path, console.warn))
    return summary


def train_command(argv: Sequence[str], prog: str) -> None:
    config, why = settle(read_flags(argv, prog))
    dist = DistContext.from_env()
    fit(Trainer(config, dist=dist), why)
    dist.close()

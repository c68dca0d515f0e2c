"""Train a model: `minigrpo train [flags]`, or `python train.py [flags]` in a checkout.

Several processes: `torchrun --nproc_per_node=2 distributed_train.py [flags]`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..config import read_flags, settle
from ..runtime.distributed import DistContext
from ..trainer import Trainer
from ..types import ConfigError
from . import doctor
from .runs import read_run


def fit(trainer: Trainer) -> Mapping[str, Any]:
    """Train, and print what the doctor finds; return the contents of summary.json."""
    summary = trainer.fit()
    console = trainer.console
    if trainer.dist.is_main:
        with suppress(ConfigError):  # a full disk may have left no metrics
            doctor.print_findings(console, read_run(trainer.run_dir.path, console.warn))
    return summary


def main(argv: Sequence[str], prog: str) -> None:
    """Train with the given flags."""
    config, why = settle(read_flags(argv, prog))
    dist = DistContext.from_env()
    fit(Trainer(config, dist=dist, why=why))
    dist.close()

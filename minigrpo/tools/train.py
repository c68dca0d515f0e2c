"""Train a model: `minigrpo train [flags]`, or `python train.py [flags]` in a checkout.

Several processes: `torchrun --nproc_per_node=2 distributed_train.py [flags]`. If torchrun has set
WORLD_SIZE, this process joins the others.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import Config
from ..runtime.distributed import DistContext
from ..runtime.failures import RunFailed, in_one_line
from ..runtime.flags import ConfigError, exit_with
from ..runtime.oom import is_out_of_memory
from ..trainer import Trainer
from .ending import show_ending
from .live import LiveDoctor
from .plan import print_plan


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Train with the given flags. Invalid ones give one line on stderr and exit code 2.

    A run that fails exits with code 1: with one line for a RunFailed, such as a loss that is not
    finite, and with a traceback for any other exception.
    """
    config = Config.from_cli(argv, prog=prog or Path(sys.argv[0]).name)
    try:
        dist = DistContext.from_env(config.run.pg_timeout)
        if config.run.plan:
            print_plan(config, dist)
            dist.close()
            return
        trainer = Trainer(config, dist=dist)
    except (ValueError, OSError) as error:
        exit_with(in_one_line(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        exit_with(ConfigError(f"the model does not fit into the memory of {config.speed.device}"))
    if dist.is_main:
        trainer.run_dir.listeners.append(LiveDoctor(trainer.run_dir.path, trainer.screen.warn))
    try:
        trainer.fit()
    except ConfigError as error:  # one that depends on the data, such as a prompt that is too long
        exit_with(error)
    except RunFailed as error:
        sys.exit(f"error: {error}")
    if dist.is_main:
        show_ending(trainer.screen, trainer.run_dir.path, trainer.run_dir.shown)
    dist.close()


if __name__ == "__main__":
    main()

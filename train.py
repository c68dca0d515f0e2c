"""Train on one device: `python train.py --help`."""

import sys
from collections.abc import Callable

from minigrpo import Config, Trainer
from minigrpo.runtime.guard import Diverged
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.flags import ConfigError, exit_with


def main(join: Callable[[Config], DistContext] = lambda config: DistContext()) -> None:
    config = Config.from_cli()
    dist = join(config)
    try:
        trainer = Trainer(config, dist=dist)
    except ValueError as error:
        exit_with(error)
    try:
        trainer.fit()
    except ConfigError as error:  # what only shows on the data: a prompt that is too long, say
        exit_with(error)
    except Diverged as error:
        sys.exit(f"error: {error}")
    dist.close()


if __name__ == "__main__":
    main()

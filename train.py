"""Train on one device: `python train.py --help`."""

from minigrpo import Config, Trainer
from minigrpo.config import ConfigError, exit_with


def main() -> None:
    config = Config.from_cli()
    try:
        trainer = Trainer(config)
    except ValueError as error:
        exit_with(error)
    try:
        trainer.fit()
    except ConfigError as error:  # what only shows on the data: a prompt that is too long, say
        exit_with(error)


if __name__ == "__main__":
    main()

"""Train on one device: `python train.py --help`."""

from minigrpo import Config, Trainer
from minigrpo.config import exit_with


def main() -> None:
    config = Config.from_cli()
    try:
        trainer = Trainer(config)
    except ValueError as error:
        exit_with(error)
    trainer.fit()


if __name__ == "__main__":
    main()

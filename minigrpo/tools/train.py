"""Train a model: `minigrpo train [flags]`, or `python train.py [flags]` in a checkout.

Several processes: `torchrun --nproc_per_node=2 distributed_train.py [flags]`.
"""

from collections.abc import Sequence

from ..config import read_flags, settle
from ..runtime.distributed import DistContext
from ..trainer import Trainer


def train_command(argv: Sequence[str], prog: str) -> None:
    config, why = settle(read_flags(argv, prog))
    dist = DistContext.from_env()
    trainer = Trainer(config, dist=dist)
    if why:
        trainer.console.say(why)
    trainer.fit()
    dist.close()

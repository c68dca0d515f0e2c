"""Train in several processes: `torchrun --nproc_per_node=2 distributed_train.py --help`. The same
flags as train.py.
"""

from minigrpo.runtime.distributed import DistContext
from train import main

if __name__ == "__main__":
    main(lambda config: DistContext.from_env(config.run.pg_timeout))

"""Train in several processes: `torchrun --nproc_per_node=2 distributed_train.py --help`.

The flags are those of train.py. Each process joins the others because torchrun sets WORLD_SIZE.
"""

from minigrpo.tools.cli import run_script

if __name__ == "__main__":
    run_script("train")

"""Train a model: `python train.py --help`. The same as `minigrpo train`."""

from minigrpo.tools.cli import run_script

if __name__ == "__main__":
    run_script("train")

"""Train a model: `python train.py --help`. The same as `minigrpo train`."""

from minigrpo.tools.train import main

if __name__ == "__main__":
    main()

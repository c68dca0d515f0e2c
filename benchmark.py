"""Measure on this machine: `python benchmark.py [NAME] [flags]`; `--help` lists the names."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])

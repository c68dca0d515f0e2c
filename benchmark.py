"""Measure on this machine: `python benchmark.py [steps|memory|rewards|scaling] [flags]`."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])

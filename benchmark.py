"""Measure on this machine: `python benchmark.py [steps|memory|rewards|scaling] [flags]`."""

from minigrpo.tools.cli import run_script

if __name__ == "__main__":
    run_script("benchmark")

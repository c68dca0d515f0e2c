"""Measure on this machine: `python benchmark.py [NAME] [flags]`; `--help` lists the names."""

from minigrpo.tools.cli import run_script

if __name__ == "__main__":
    run_script("benchmark")

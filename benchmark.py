"""Measure on this machine: `python benchmark.py [NAME] [flags]`, NAME is steps if left out; `NAME
--help` lists its flags.
"""

import json
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.memory import Memory
from benchmarks.rewards import Rewards
from benchmarks.scaling import Scaling
from benchmarks.steps import Steps
from minigrpo.runtime.flags import ConfigError, exit_with, parse


class Benchmark(Protocol):
    @property
    def json(self) -> Path | None:
        """Where the figures go, besides the terminal."""

    def run(self, console: Console) -> dict[str, Any]: ...


BENCHMARKS: dict[str, type[Benchmark]] = {
    "steps": Steps,
    "memory": Memory,
    "rewards": Rewards,
    "scaling": Scaling,
}


def main(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("steps", argv)
    if name not in BENCHMARKS:
        exit_with(
            ConfigError(
                f"python benchmark.py [NAME]: NAME must be one of {', '.join(BENCHMARKS)}, got "
                f"{name!r}"
            )
        )
    console = Console() if sys.stdout.isatty() else Console(width=150)  # tables are wide
    try:
        benchmark = parse(BENCHMARKS[name], rest, prog=f"benchmark.py {name}")
        result = benchmark.run(console)
    except ValueError as error:
        exit_with(error)
    if benchmark.json:
        benchmark.json.parent.mkdir(parents=True, exist_ok=True)
        benchmark.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        console.print(f"wrote {benchmark.json}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python benchmark.py [NAME] [flags]`: NAME defaults to steps; `NAME --help` lists its flags."""

import json
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from minigrpo.runtime.flags import ConfigError, exit_with, parse

from .memory import Memory
from .plan import Plan
from .rewards import Rewards
from .scaling import Scaling
from .steps import Steps


class Benchmark(Protocol):
    """A benchmark, with its flags as fields."""

    @property
    def json(self) -> Path | None:
        """A file to write the figures to, besides the terminal."""

    def run(self, console: Console) -> dict[str, Any]:
        """Measure, print tables, and return the figures. Raises ValueError for bad flags."""


BENCHMARKS: dict[str, type[Benchmark]] = {
    "steps": Steps,
    "memory": Memory,
    "plan": Plan,
    "rewards": Rewards,
    "scaling": Scaling,
}


def main(argv: list[str]) -> None:
    """Run one benchmark. Invalid input gives one line on stderr and exit code 2."""
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("steps", argv)
    if name not in BENCHMARKS:
        allowed = ", ".join(BENCHMARKS)
        exit_with(
            ConfigError(f"python benchmark.py [NAME]: NAME must be one of {allowed}, got {name!r}")
        )
    console = Console() if sys.stdout.isatty() else Console(width=150)  # the tables are wide
    try:
        others = ", ".join(other for other in BENCHMARKS if other != name)
        about = f"{BENCHMARKS[name].__doc__} Other benchmarks: {others}."
        benchmark = parse(BENCHMARKS[name], rest, prog=f"benchmark.py {name}", description=about)
        result = benchmark.run(console)
    except ValueError as error:
        exit_with(error)
    if benchmark.json:
        benchmark.json.parent.mkdir(parents=True, exist_ok=True)
        benchmark.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        console.print(f"wrote {benchmark.json}")

"""`python benchmark.py [NAME] [flags]`: NAME defaults to steps; `NAME --help` lists its flags."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from minigrpo.runtime.flags import ConfigError, exit_with, parse
from minigrpo.runtime.outputs import (
    check_is_not_read,
    check_output_file,
    check_output_folder,
    write_output,
)

from .code import Code
from .gap import Gap
from .groups import Groups
from .length import Length
from .memory import Memory
from .peers import Peers
from .plan import Plan
from .precision import Precision
from .profile import Profile
from .report import RESULTS
from .rewards import Rewards
from .rollouts import Rollouts
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
    "code": Code,
    "scaling": Scaling,
    "precision": Precision,
    "peers": Peers,
    "length": Length,
    "gap": Gap,
    "groups": Groups,
    "rollouts": Rollouts,
    "profile": Profile,
}


def parse_benchmark(argv: Sequence[str], prog: str = "python benchmark.py") -> Benchmark:
    """The benchmark of a command line, with its flags; it is not run. Raises ValueError."""
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("steps", argv)
    if name not in BENCHMARKS:
        allowed = ", ".join(BENCHMARKS)
        raise ConfigError(f"{prog} [NAME]: NAME must be one of {allowed}, got {name!r}")
    others = ", ".join(other for other in BENCHMARKS if other != name)
    about = f"{BENCHMARKS[name].__doc__} Other benchmarks: {others}."
    return parse(BENCHMARKS[name], rest, prog=f"{prog} {name}", description=about)


def main(argv: Sequence[str], prog: str = "python benchmark.py") -> None:
    """Run one benchmark. Invalid input gives one line on stderr and exit code 2.

    `prog` is the program as the user typed it.
    """
    console = Console() if sys.stdout.isatty() else Console(width=170)  # the tables are wide
    try:
        benchmark = parse_benchmark(argv, prog)
        out_dir = getattr(benchmark, "out_dir", None)
        if hasattr(benchmark, "out_dir"):
            check_output_folder("--out-dir", out_dir or RESULTS)
        if benchmark.json:
            check_output_file("--json", benchmark.json)
            config = getattr(benchmark, "config", None) or ()  # a file, or several
            files = config if isinstance(config, tuple) else (config,)
            check_is_not_read("--json", benchmark.json, map(str, files))
        result = benchmark.run(console)
        if benchmark.json:
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            write_output("--json", benchmark.json, lambda file: file.write_text(text))
            console.print(f"wrote {benchmark.json}", markup=False)
    except (ValueError, OSError) as error:  # such as a disk that fills up while it runs
        exit_with(error)

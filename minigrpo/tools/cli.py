"""The command `minigrpo COMMAND [flags]`. `minigrpo COMMAND --help` lists a command's flags.

A command's module is imported only when the command runs, so that `minigrpo --help` does not wait
several seconds for torch. Here, and only here, a ConfigError or an OSError becomes one line and
exit code 2. Any other error, such as one of a user's function, keeps its traceback.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

BAD_INPUT, CTRL_C = 2, 130  # exit codes; 130 is 128 + SIGINT
COMMANDS = {
    "train": "train a model with GRPO, or supervised on true answers",
    "evaluate": "score a model on held-out examples, with confidence intervals",
    "sample": "prompt a model, or show its answers to held-out examples",
    "report": "write a page about runs: curves, settings, findings and samples",
    "compare": "tell what differs between runs, and whether it is more than chance",
    "doctor": "tell what is wrong with a run, and what to do about it",
    "export": "write a model as a folder that transformers loads",
    "plan": "estimate the memory of a training step, by parts",
    "benchmark": "measure the gain of each speed layer on this machine",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:<10}  {summary}" for command, summary in COMMANDS.items()]
        usage = "usage: minigrpo COMMAND [flags]; minigrpo COMMAND --help lists them\n"
        print(usage, *lines, sep="\n")
    elif name in COMMANDS:
        run_command(name, rest, prog=f"minigrpo {name}")
    else:
        fail(f"no command {name!r}; there are {', '.join(COMMANDS)}")


def run_script(name: str) -> None:
    """What train.py and its like do: run one command under the script's own name."""
    run_command(name, sys.argv[1:], prog=Path(sys.argv[0]).name)


def run_command(name: str, argv: Sequence[str], prog: str) -> None:
    """Run a command; bad input ends the process with one line on stderr and exit code 2."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    try:
        _module(name).main(list(argv), prog)
    except KeyboardInterrupt:
        sys.exit(CTRL_C)
    except Exception as error:
        from ..types import ConfigError

        if not isinstance(error, ConfigError | OSError):
            raise
        fail(" ".join(str(error).split()) or type(error).__name__)


def fail(text: str) -> NoReturn:
    """End the process with one line on stderr."""
    sys.stderr.write(f"error: {printable(text)}\n")
    raise SystemExit(BAD_INPUT)


def printable(text: str) -> str:
    """A text that controls no terminal: only ends of lines and tabs stay as they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _module(name: str) -> Any:
    """The module of a command."""
    return import_module(f"{_benchmarks()}.cli" if name == "benchmark" else f"{__package__}.{name}")


def _benchmarks() -> str:
    """The package of the benchmarks: the checkout's folder, else what a wheel installs it as."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return "minigrpo_benchmarks"
    sys.path.insert(0, str(checkout))  # the command may be started from another folder
    return "benchmarks"

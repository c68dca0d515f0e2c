"""The command `minigrpo COMMAND [flags]`. `minigrpo COMMAND --help` lists a command's flags.

A command's module is imported only when the command runs, so that `minigrpo --help` does not wait
several seconds for torch. Here, and only here, bad input becomes one line and exit code 2.
"""

import difflib
import os
import sys
import traceback
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
    run_command(name, rest, prog=f"minigrpo {name}")


def run_script(name: str) -> None:
    """What train.py and its like do: run one command under the script's own name."""
    run_command(name, sys.argv[1:], prog=Path(sys.argv[0]).name)


def run_command(name: str, argv: Sequence[str], prog: str) -> None:
    """Run a command; bad input ends the process with one line on stderr and exit code 2."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    try:
        if name in ("-h", "--help"):
            print(usage())
        else:
            _module(name).main(list(argv), prog)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(CTRL_C) from None
    except BrokenPipeError:  # `minigrpo --help | head -1`; Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        fail(in_one_line(error))


def fail(text: str) -> NoReturn:
    """End the process with one line on stderr."""
    sys.stderr.write(f"error: {printable(text)}\n")
    raise SystemExit(BAD_INPUT)


def in_one_line(error: Exception) -> str:
    """The text of an error; of an unexpected one also where it was raised."""
    from ..types import ConfigError

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConfigError | OSError):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({type(error).__name__} in {place.filename}, line {place.lineno})"


def printable(text: str) -> str:
    """A text that controls no terminal: only ends of lines and tabs stay as they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def usage() -> str:
    """What `minigrpo --help` prints: the commands, one per line."""
    lines = [f"  {name:<10}  {summary}" for name, summary in COMMANDS.items()]
    hints = [
        "`minigrpo train` trains the bundled model, without a download.",
        "`minigrpo COMMAND --help` lists a command's flags.",
    ]
    return "\n".join(["usage: minigrpo COMMAND [flags]", "", *lines, "", *hints])


def _module(name: str) -> Any:
    """The module of a command."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        fail(f"minigrpo has no command {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return import_module(f"{_benchmarks()}.cli" if name == "benchmark" else f"{__package__}.{name}")


def _benchmarks() -> str:
    """The package of the benchmarks: the checkout's folder, else what a wheel installs it as."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return "minigrpo_benchmarks"
    sys.path.insert(0, str(checkout))  # the command may be started from another folder
    return "benchmarks"

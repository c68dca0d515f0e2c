"""The command `minigrpo COMMAND [flags]`. `minigrpo COMMAND --help` lists a command's flags.

A command's module is imported only when the command runs, so that `minigrpo --help` does not wait
several seconds for torch. Here, and only here, an error becomes one line: a ConfigError or an
OSError with exit code 2, and RunFailed, such as of a run that diverges, with exit code 1. Any other
error, such as one of a user's function, keeps its traceback.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from ..errors import ConfigError, RunFailed
from ..userfiles import place_of

COMMANDS = {
    "train": "train a model with GRPO, or supervised on true answers",
    "evaluate": "score a model on held-out examples, with confidence intervals",
    "sample": "prompt a model with a text of your own",
    "report": "write a page about runs: curves, settings, findings and samples",
    "compare": "tell what differs between runs, and whether it is more than chance",
    "doctor": "tell what is wrong with a run, and what to do about it",
    "export": "write a model as a folder that transformers loads",
    "plan": "estimate the memory of a training step, by component",
    "benchmark": "measure speed and memory on this machine, layer by layer",
}
# the help of train, with the settings that most runs need
SHORT_PAGE = """usage: START [--config FILE.toml] [flags]

Train a model with GRPO, or supervised on true answers.

SETTINGS

A published model brings other defaults: docs/models.md.

  # the demo of a model that ships
  START
  # a model, rows and rewards of your own
  START --model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl --rewards rewards.py \\
      --out-dir runs/a
  # go on after a stop
  minigrpo train --config runs/a/config.toml --out-dir runs/a --resume auto

START --help all lists every setting, by group."""


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    name, *flags = words or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:<10}  {summary}" for command, summary in COMMANDS.items()]
        print("usage: minigrpo COMMAND [flags]; minigrpo COMMAND --help lists them\n")
        print(*lines, sep="\n")
    elif name in COMMANDS:
        run_command(name, flags, prog=f"minigrpo {name}")
    else:
        fail(f"no command {name!r}; there are {', '.join(COMMANDS)}")


def run_script(name: str) -> None:
    """What train.py and its like do: run one command under the script's own name."""
    run_command(name, sys.argv[1:], prog=Path(sys.argv[0]).name)


def run_command(name: str, argv: Sequence[str], prog: str) -> None:
    """Run a command, with the exit codes that the module's docstring lists."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    sys.path.append("")  # a user's file may import others of the folder that a run starts in
    try:
        if name == "train" and {"-h", "--help"} & {*argv}:
            show_help(argv, prog)
            return
        _function(name)(list(argv), prog)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT
    except (ConfigError, OSError, RunFailed) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        place = place_of(error)  # in a file of the user's, if it is of their code
        fail(place + text, code=1 if isinstance(error, RunFailed) else 2)


def show_help(argv: Sequence[str], prog: str) -> None:
    """Print the settings that most runs need, and examples; with `--help all` every setting."""
    from ..settings import SHORT_HELP, fields_of, places

    if "all" in argv:
        import tyro

        from ..config import Config

        # prints the settings by their groups, and ends the process
        tyro.cli(Config, args=["--help"], prog=prog, config=(tyro.conf.OmitArgPrefixes,))
    settings = []
    for flat_name, (group, field) in places().items():
        setting = fields_of(group)[field]
        if SHORT_HELP in setting.metadata:
            flag = f"  --{flat_name.replace('_', '-')} {setting.default}"
            text = f"{flag:<25} {setting.description}"
            indent = " " * 26
            settings.append(fill(text, 100, subsequent_indent=indent, break_on_hyphens=False))
    start = f"python {prog}" if prog.endswith(".py") else prog
    print(SHORT_PAGE.replace("START", start).replace("SETTINGS", "\n".join(settings)))


def fail(text: str, code: int = 2) -> NoReturn:
    sys.stderr.write(f"error: {printable(text)}\n")
    sys.exit(code)


def printable(text: str) -> str:
    """A text that controls no terminal: only ends of lines and tabs stay as they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _function(name: str) -> Callable[[list[str], str], None]:
    """The function of a command. An installation has a checkout's benchmarks/ under a long name."""
    if name == "benchmark":
        return import_module("minigrpo_benchmarks.cli").main
    module = "models" if name in ("train", "evaluate", "sample", "export") else name
    return getattr(import_module(f"{__package__}.{module}"), f"{name}_command")

"""The command `minigrpo COMMAND [flags]`. `minigrpo COMMAND --help` lists a command's flags.

The settings of a run are many: `minigrpo train --help` has those that most runs need, and
`--help all` has the others.

A command's module is imported only when the command runs, so that `minigrpo --help` does not wait
several seconds for torch. Here, and only here, a ConfigError or an OSError becomes one line and
exit code 2. Any other error, such as one of a user's function, keeps its traceback.
"""

import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
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
# the settings that most runs need, for --help; --help all has the others
SHORT = (
    *("model", "data", "task", "rewards", "loss", "max_steps", "prompts_per_step", "group_size"),
    *("max_new_tokens", "learning_rate", "lora_rank", "out_dir"),
)
OWN_JOB = "--model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl --rewards rewards.py"
EXAMPLES = {
    "train": {
        "the demo of a model that ships": "",
        "a model, rows and rewards of your own": f"{OWN_JOB} --out-dir runs/a",
        "go on after a stop": "--config runs/a/config.toml --out-dir runs/a --resume auto",
    },
    "plan": {"a model, rows and rewards of your own": OWN_JOB},
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
        if name in EXAMPLES and {"-h", "--help"} & {*argv}:
            show_help(name, argv, prog)
            return
        _module(name).main(list(argv), prog)
    except KeyboardInterrupt:
        sys.exit(CTRL_C)
    except Exception as error:
        from ..types import ConfigError

        if not isinstance(error, ConfigError | OSError):
            raise
        fail(" ".join(str(error).split()) or type(error).__name__)


def show_help(name: str, argv: Sequence[str], prog: str) -> None:
    """Print the settings that most runs need, and examples; with `--help all` every setting."""
    from ..config import Config, places

    if "all" in argv:
        Config.from_cli(["--help"], prog=prog)
    start = f"python {prog}" if prog.endswith(".py") else prog
    fill = partial(textwrap.wrap, width=96, break_on_hyphens=False)
    lines = [f"usage: {start} [--config FILE.toml] [flags]", "", COMMANDS[name], ""]
    for setting in SHORT:
        group, field = places()[setting]
        values = getattr(Config(), group)
        flag = f"  --{setting.replace('_', '-')} {getattr(values, field)}"
        about = type(values).model_fields[field].description or ""
        lines += fill(f"{flag:<26}{about}", subsequent_indent=" " * 26)
    lines += ["", "A task and a published model bring other defaults: docs/models.md.", ""]
    for what, flags in EXAMPLES[name].items():
        command = fill(f"  {start} {flags}", subsequent_indent="      ")
        lines += [f"  # {what}", *" \\\n".join(command).split("\n")]
    lines += ["", f"{start} --help all lists every setting, by group."]
    print(*lines, sep="\n")


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

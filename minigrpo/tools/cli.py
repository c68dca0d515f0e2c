"""The command `minigrpo COMMAND [flags]`. `minigrpo COMMAND --help` lists a command's flags.

A command's module is imported only when the command runs, so that `minigrpo --help` does not wait
several seconds for torch.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

CTRL_C = 130  # 128 + SIGINT
COMMANDS = {
    "train": "train a model with GRPO, or warm it up on true answers",
    "evaluate": "score a model on held-out examples, with confidence intervals",
    "sample": "prompt a model, and show its completions beside the true answers",
    "report": "write a page: curves, settings, findings and samples of runs",
    "doctor": "say what is wrong with a run, and what to do about it",
    "compare": "say what differs between runs, and whether it is more than chance",
    "curves": "compare the learning curves of runs, as a table and a figure",
    "export": "write a model as a folder that transformers loads",
    "annotate": "make training data: chess positions with Stockfish's best moves",
    "plan": "estimate the tokens, memory and seconds of one training step",
    "benchmark": "measure the gain of each speed layer on this machine",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. For an unknown command, exits with code 2 and one line on stderr."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        from ..runtime.flags import closed_pipe_is_no_error

        with closed_pipe_is_no_error():
            sys.stdout.write(usage())
        return
    with ended_by_ctrl_c():
        run_command(name, rest, prog=f"minigrpo {name}")


def run_script(name: str) -> None:
    """What train.py and its like do: run one command under the script's own name."""
    with ended_by_ctrl_c():
        run_command(name, sys.argv[1:], prog=Path(sys.argv[0]).name)


def run_command(name: str, argv: Sequence[str], prog: str) -> None:
    if name == "benchmark":
        import_module(f"{_benchmarks()}.cli").main(list(argv), prog=prog)
    elif name in COMMANDS:
        import_module(f"{__package__}.{name}").main(argv, prog=prog)
    else:
        from ..runtime.flags import ConfigError, did_you_mean, exit_with

        hint = did_you_mean(name, list(COMMANDS))
        exit_with(ConfigError(f"minigrpo has no command {name!r}{hint}"))


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """End with one line and the shell's exit code for Ctrl-C, also while torch is imported."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(CTRL_C) from None


def usage() -> str:
    """What `minigrpo --help` prints: the commands, one per line."""
    lines = [f"  {name:<10}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        (
            "usage: minigrpo COMMAND [flags]",
            "",
            *lines,
            "",
            "`minigrpo train` trains the bundled model, without a download.",
            "`minigrpo COMMAND --help` lists a command's flags.",
            "",
        )
    )


def _benchmarks() -> str:
    """The package of the benchmarks: the folder of the checkout, else the installed package.

    A wheel installs it under a longer name, because a top-level package named `benchmarks` could
    clash with another one.
    """
    checkout = Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return "minigrpo_benchmarks"
    if str(checkout) not in sys.path:  # started from another folder
        sys.path.insert(0, str(checkout))
    return "benchmarks"

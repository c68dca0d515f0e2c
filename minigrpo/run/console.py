"""What people see of a run or a command: lines of text, and tables."""

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.table import Table

from ..config import Config
from ..metrics import SAMPLED, headline
from ..statistics import Estimate
from ..task import Task
from .logging import LogLine

PERIOD = 15.0  # seconds between lines of progress
WIDEST_LINE = 100_000  # columns of a file or a pipe


class Output:
    """A stream that never raises: a closed one shows nothing, and odd characters are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = stream.encoding or "utf-8"
        self.is_terminal = not self.stream.closed and self.stream.isatty()

    def write(self, text: str) -> None:
        shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        with suppress(OSError, ValueError):
            self.stream.write(shown)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()


def screen() -> rich.console.Console:
    """Standard output for rich. A file, a pipe or a notebook gets plain text, as wide as it is."""
    output: Any = Output(sys.stdout)
    return rich.console.Console(
        file=output,
        width=None if output.is_terminal else WIDEST_LINE,
        force_terminal=output.is_terminal,
        force_jupyter=False,
        soft_wrap=True,
        markup=False,
        emoji=False,
        highlight=False,
    )


class Console:
    """Where a run or a command prints: the main process alone, but every process may warn."""

    def __init__(self, *, quiet: bool = False, rank: int = 0) -> None:
        self.quiet = quiet or rank > 0
        self.rank = rank
        self.warned = set[str]()
        self.said_at = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line to stdout, unless quiet."""
        self.said_at = time.monotonic()
        if not self.quiet:
            print(text, file=Output(sys.stdout), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning to stderr, once: a command may read the same settings twice."""
        where = f" (rank {self.rank})" if self.rank else ""
        if text not in self.warned:
            print(f"warning{where}: {text}", file=Output(sys.stderr), flush=True)
        self.warned.add(text)

    def is_silent(self) -> bool:
        """Whether nothing was said for 15 seconds."""
        return time.monotonic() - self.said_at >= PERIOD

    def progress(
        self,
        step: int,
        last_step: int,
        metrics: Mapping[str, float],
        *,
        always: bool,
    ) -> None:
        """Show how far a run is: by a line every 15 seconds, unless it is `always` to be shown."""
        if not (always or self.is_silent()):
            return
        name = "reward" if "reward" in metrics else "loss"
        seconds = metrics["step_time"]
        minutes_left, seconds_left = divmod(int((last_step - step) * seconds), 60)
        left = f"left {minutes_left}:{seconds_left:02d}"
        progress = f"step {step}/{last_step}  {name} {metrics[name]:.3f}"
        self.say(f"{progress}  {seconds:.2f} s/step  {left}")

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Print rows under their columns. On a narrow terminal, cells take several lines."""
        table = Table(box=None, pad_edge=False, show_header=any(columns))
        for i, name in enumerate(columns):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.say(f"\n{title}")
        if not self.quiet:
            screen().print(table)
        self.say("")

    def introduce(
        self,
        config: Config,
        task: Task,
        weights: Mapping[str, float],
        machines: str,
    ) -> None:
        prompts = config.sampling.prompts_per_step
        completions = 1 if config.supervised else config.sampling.group_size
        self.say(
            f"{config.loss.name}: {prompts} prompts x {completions} completions per step, on "
            f"{machines}; learning rate {config.optimizer.learning_rate:g}"
        )
        paid = [f"{x:g} x {name}" for name, x in weights.items() if x]
        self.say(f"reward: {' + '.join(paid) or 'none'}")
        if task.about:
            self.say(f"task: {task.about}")

    def evaluating(self, done: int, total: int) -> None:
        """Show how many completions of an evaluation are done, by a line every 15 seconds."""
        if done < total and self.is_silent():
            self.say(f"held out: {done} of {total} completions")

    def evaluation(self, step: int, estimates: Mapping[str, Estimate]) -> None:
        greedy = headline(estimates)
        sampled = greedy + SAMPLED
        shown = f"{sampled} {estimates[sampled]}, {greedy} {estimates[greedy]}"
        self.say(f"held out, step {step}: {shown}")

    def finish(self, folder: Path, summary: LogLine) -> None:
        """Say how a run ended, and what to type next."""
        ended = f"{summary['status']} ({summary['exit_reason']}) at step {summary['step']}"
        self.say(f"{ended} after {summary['wall_seconds']:.0f} s: {folder}")
        if summary["status"] == "stopped":
            self.say(
                f"continue: minigrpo train --config {folder}/config.toml --out-dir {folder} "
                "--resume auto (of a script: run it again with resume='auto')"
            )
        more = f"minigrpo doctor {folder}; minigrpo sample {folder} --prompt TEXT"
        self.say(f"next: minigrpo report {folder}; {more}")

"""What people see of a run or a command: lines of text and tables."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TextIO

import rich.console
from rich.progress import Progress

from ..config import Config
from ..metrics import SAMPLED, headline
from ..runtime.statistics import Estimate
from ..task import Task
from .logging import LogLine


class Console:
    """Where a run or a command prints: the main process alone, but every process may warn."""

    def __init__(self, *, quiet: bool = False, rank: int = 0) -> None:
        self.quiet = quiet or rank > 0
        self.rank = rank
        self.warned = set[str]()
        self.line_printed_at = 0.0  # the time of the last line of progress
        self.values_since_line: list[float] = []  # the reward or loss of each step after it
        self.estimates_by_step: dict[int, Mapping[str, Estimate]] = {}  # of the evaluations

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line, to stdout unless quiet.

        Neither a terminal or pipe that is closed, nor one that has no Unicode, must end a run.
        """
        if stream or not self.quiet:
            encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
            shown = text.encode(encoding, "backslashreplace").decode(encoding)
            with suppress(OSError, ValueError):
                print(shown, file=stream, flush=True)

    def warn(self, text: str) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        if text not in self.warned:  # a command may read the same settings twice
            self.say(f"warning{where}: {text}", sys.stderr)
        self.warned.add(text)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on a terminal, if work takes over a second; call what it gives for each piece."""
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        progress = Progress(
            console=rich.console.Console(file=sys.stdout),
            transient=True,
            disable=self.quiet or not is_terminal,
        )
        task = progress.add_task(what, total=total)
        begun = time.monotonic()

        def advance() -> None:
            progress.advance(task)
            if time.monotonic() > begun + 1:
                progress.start()

        try:
            yield advance
        finally:
            if progress.live.is_started:
                progress.stop()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under the names of their columns."""
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        self.say(f"\n{title}")
        for row in (columns, *rows):
            self.say("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
        self.say("")

    def introduce(
        self, config: Config, why: str, task: Task, weights: Mapping[str, float], machines: str
    ) -> None:
        """Say what a step is, `why` defaults are what they are, and what the reward is."""
        prompts = config.sampling.prompts_per_step
        completions = 1 if config.supervised else config.sampling.group_size
        self.say(
            f"{config.loss.name}: {prompts} prompts x {completions} completions per step, on "
            f"{machines}; learning rate {config.optimizer.learning_rate:g}"
        )
        if why:
            self.say(why)
        paid = [f"{x:g} x {name}" for name, x in weights.items() if x]
        self.say(f"reward: {' + '.join(paid) or 'none'}")
        if task.about:
            self.say(f"task: {task.about}")

    def update(self, step: int, last_step: int, metrics: Mapping[str, float]) -> None:
        """Say every 15 seconds where a run is: its mean reward or loss, and the time left."""
        name = "reward" if "reward" in metrics else "loss"
        self.values_since_line.append(metrics[name])
        now = time.monotonic()
        if now - self.line_printed_at >= 15 or step == last_step:
            seconds = metrics["step_time"]
            minutes_left, seconds_left = divmod(int((last_step - step) * seconds), 60)
            self.say(
                f"step {step}/{last_step}  {name} {fmean(self.values_since_line):.3f}  "
                f"{seconds:.2f} s/step  left {minutes_left}:{seconds_left:02d}"
            )
            self.line_printed_at = now
            self.values_since_line.clear()

    def evaluation(self, step: int, estimates: Mapping[str, Estimate]) -> None:
        """Say the headline of an evaluation, sampled and greedy."""
        self.estimates_by_step[step] = estimates
        greedy = headline(estimates)
        shown = [f"{name} {estimates[name]}" for name in (greedy + SAMPLED, greedy)]
        self.say(f"held out, step {step}: {', '.join(shown)}")

    def measures(self, evaluations: Mapping[str, Mapping[str, float | Estimate]]) -> None:
        """Print the measures of evaluations, each in a column with its name."""
        rows = []
        for name in dict.fromkeys(chain(*evaluations.values())):
            if name not in ("step", "n"):
                values = [evaluation.get(name, math.nan) for evaluation in evaluations.values()]
                cells = [str(x if isinstance(x, Estimate) else Estimate(x)) for x in values]
                rows.append([name, *cells])
        title = f"held out, with 95 % intervals; NAME{SAMPLED}: at temperature 1, else greedy"
        self.table(title, ["", *evaluations], rows)

    def finish(self, folder: Path, summary: LogLine) -> None:
        """Say how a run ended, and what to type next."""
        ended = f"{summary['status']} ({summary['exit_reason']}) at step {summary['step']}"
        self.say(f"{ended} after {summary['wall_seconds']:.0f} s: {folder}")
        if summary["status"] == "stopped":
            self.say(
                f"continue: minigrpo train --config {folder}/config.toml --out-dir {folder} "
                "--resume auto (of a script: run it again with resume='auto')"
            )
        else:
            columns: dict[str, Mapping[str, float | Estimate]] = {}
            for values in (summary["first_evaluation"], summary["last_evaluation"]):
                step = int(values["step"])  # those of before a resume have no intervals here
                columns[f"step {step}"] = self.estimates_by_step.get(step) or values
            self.measures(columns)
        more = f"minigrpo doctor {folder} | minigrpo sample {folder} [--prompt TEXT]"
        self.say(f"next: minigrpo report {folder} | {more}")

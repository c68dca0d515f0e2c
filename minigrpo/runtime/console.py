"""What people see: messages, tables, and progress as a bar on a terminal or as lines elsewhere.

Only the main process prints. Every process may warn; the warning names its rank. Texts are never
markup: a reward function may be called `[/b]`.
"""

import io
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import rich.console
import torch
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..config import Config
from ..task import Task
from ..types import EXACT
from .stats import PASS_AT, SAMPLED, Estimate, headline

SECONDS_BETWEEN_LINES = 15.0  # between progress lines, where there is no bar
STEPS_WITHOUT_SIGNAL = 20  # in a row, before a warning
WATCHED = {  # metric -> the least value that is a problem, and the warning
    "frac_reward_zero_std": (
        1.0,
        "all completions of each prompt had equal rewards, so nothing is learnt. A model that "
        "never gets anything right needs --loss nll (SFT on true answers) first",
    ),
    "completions/clipped_ratio": (
        0.5,
        "at least half of the completions were cut off at --max-new-tokens, and scored by half a "
        "text. Raise it; a model that never ends needs --loss nll (SFT on true answers) first",
    ),
}


class Console:
    """Where a run, or a command, prints. A closed pipe or a full disk there ends nothing."""

    def __init__(self, *, quiet: bool = False, rank: int = 0) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal may lack some characters
                stream.reconfigure(errors="backslashreplace")
        self.rank, quiet = rank, quiet or rank > 0
        self.out = rich.console.Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.errors = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self.is_live = self.out.is_terminal and not self.out.is_dumb_terminal and not quiet
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self.out,
            expand=True,
        )
        self.last_line = 0.0
        self.total = self.tokens_per_length = 0  # of steps; of completions per step
        self.without_signal = dict.fromkeys(WATCHED, 0)  # steps in a row

    def say(self, text: str, style: str = "") -> None:
        self._print(self.out, Text(text, style=style))

    def warn(self, text: str) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        self._print(self.errors, Text(f"warning{where}: {text}", style="yellow"))

    def _print(self, console: rich.console.Console, what: Text | Table) -> None:
        try:
            console.print(what)
            console.file.flush()
        except (OSError, ValueError, SystemExit):  # closed; rich exits for a broken pipe
            console.quiet = True
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                # or Python would fail when it flushes its buffer at exit
                os.dup2(nowhere.fileno(), console.file.fileno())

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under the names of their columns."""
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.collapse_padding = True
        for i, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if i else "left", no_wrap=i > 0)
        for row in rows:
            table.add_row(*map(Text, row))
        self._print(self.out, table)

    # --- the messages of a run ------------------------------------------------------------------

    def introduce(
        self,
        config: Config,
        device: torch.device,
        processes: int,
        parameters: int,
        task: Task,
        weights: Mapping[str, float],
    ) -> None:
        """Say what a step is, which layers are on, and what the reward is."""
        prompts = config.sampling.prompts_per_step
        group = 1 if config.supervised else config.sampling.group_size
        completions = "true answers" if config.supervised else f"{group} completions"
        self.tokens_per_length = prompts * group
        self.say(
            f"{config.loss.name}: {prompts} prompts x {completions} per step, on {processes} x "
            f"{device.type}; {parameters / 1e6:.1f} M parameters"
        )
        layers = {**config.speed.model_dump(), **config.memory.model_dump()}
        on = ["--" + name.replace("_", "-") for name, x in layers.items() if x is True]
        self.say(f"layers: --packing {config.speed.packing} {' '.join(on)}")
        parts = [f"{weight:g} x {name}" for name, weight in weights.items() if weight]
        where = " (in evaluations only)" if config.supervised else ""
        self.say(f"reward{where}: {' + '.join(parts) or '0'}")
        if task.about:
            self.say(f"task: {task.about}")

    def start(self, total: int, done: int) -> None:
        self.total, self.first, self.began = total, done, time.perf_counter()
        self.bar = self.progress.add_task("", total=total, completed=done)
        if self.is_live:
            self.progress.start()

    def update(
        self, done: int, metrics: Mapping[str, float], last: Mapping[str, float] | None
    ) -> None:
        """Show a step: its reward or loss, the last evaluation, and completions' tokens per second.

        Warns once of a metric of WATCHED that has been bad for several steps in a row.
        """
        seen = [f"{name} {metrics[name]:.3f}" for name in ("reward", "loss") if name in metrics][:1]
        name = headline(last or {})
        if last and name + SAMPLED in last:
            seen.append(f"{in_words(name)} {last[name + SAMPLED]:.1%}")
        tokens = metrics["completions/mean_length"] * self.tokens_per_length
        text = "  ".join([*seen, f"{tokens / metrics['step_time']:,.0f} tok/s"])
        self.progress.update(self.bar, completed=done, description=text)
        now = time.perf_counter()
        is_due = now - self.last_line >= SECONDS_BETWEEN_LINES or done == self.total
        if is_due and not self.is_live:
            self.last_line = now
            left = int((now - self.began) / (done - self.first) * (self.total - done))
            self.say(f"step {done}/{self.total}  {text}  left {left // 60}:{left % 60:02d}")
        for name, (least, words) in WATCHED.items():
            is_bad = metrics.get(name, 0.0) >= least
            self.without_signal[name] = self.without_signal[name] + 1 if is_bad else 0
            if self.without_signal[name] == STEPS_WITHOUT_SIGNAL and not self.rank:
                self.warn(f"for {STEPS_WITHOUT_SIGNAL} steps {words}")

    def stop(self) -> None:
        if self.is_live:
            self.progress.stop()

    def evaluation(self, step: int, found: Mapping[str, Estimate]) -> None:
        """Say the headline of an evaluation, sampled and greedy."""
        success = headline(found)
        sampled, greedy = (percent(found[name]) for name in (success + SAMPLED, success))
        self.say(f"held out, step {step}: {in_words(success)} {sampled} sampled, {greedy} greedy")

    def show_change(
        self,
        first: Mapping[str, float],
        last: Mapping[str, float],
        found: Mapping[float, Mapping[str, Estimate]],
    ) -> None:
        """Print the evaluations before and after, first what GRPO maximises.

        `found` has their intervals by step; an evaluation from before a resume has none.
        """
        rows = []
        for name in (x for x in first if x in last and x not in ("step", "n")):
            if name.startswith("count/"):
                continue
            ends = [found.get(x["step"], {}).get(name, Estimate(x[name])) for x in (first, last)]
            is_sampled = name.endswith(SAMPLED) or name.startswith(PASS_AT)
            how = "sampled" if is_sampled else "greedy"
            change = f"{last[name] - first[name]:+.3f}"
            rows.append([name.removesuffix(SAMPLED), how, *map(str, ends), change])
        title = f"{last.get('n', 0):.0f} held-out examples, with 95 % intervals"
        steps = [f"step {x['step']:.0f}" for x in (first, last)]
        self.table(title, ["", "", *steps, "change"], rows)

    def finish(self, run: Path, status: str, reason: str, step: int, seconds: float) -> None:
        """Say how a run ended, and what to type next."""
        took = f" after {seconds:.0f} s" if math.isfinite(seconds) else ""
        self.say(f"{status}{f' ({reason})' if reason else ''} at step {step}{took}; run: {run}")
        if status == "stopped":
            self.say(
                f"continue: minigrpo train --config {run}/config.toml --out-dir {run} --resume auto"
            )
        self.say(f"next: minigrpo report {run} | minigrpo doctor {run} | minigrpo sample {run}")


def in_words(success: str) -> str:
    """What a right completion is called: `exactly right`, or the name of the reward function."""
    return "exactly right" if success == EXACT else success.replace("_", " ")


def percent(share: Estimate) -> str:
    """A share with its 95 % interval in whole percent, if it has one."""
    low, high = (f"{100 * x:.0f}" for x in (share.low, share.high))
    return f"{share.value:.1%}" + ("" if math.isnan(share.low) else f" [{low}, {high}]")

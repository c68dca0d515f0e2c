"""Metrics as JSONL and TensorBoard, the console, and the phase timer.

Everything that a training run prints goes through `Screen`; announce.py holds the messages.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

Scalars = Mapping[str, float]
SECONDS_BETWEEN_LINES = 15.0  # between progress lines, if there is no terminal


class PhaseTimer:
    """Seconds per phase of a step.

    On CUDA a phase ends with a device sync; otherwise its work would count in the next phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class JSONLines:
    """An append-only file of records with a `step`; flushed line by line, truncated on resume."""

    def __init__(self, path: Path, *, up_to_step: int) -> None:
        """Reopen the file, and keep only complete lines whose step is at most `up_to_step`."""
        self.kept: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                break  # cut off when the process died
            if record["step"] <= up_to_step:
                self.kept.append(record)
        self.file = open(path, "w")
        for record in self.kept:
            self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class RunLog:
    """The logs in a run's folder: metrics, evaluations, samples, TensorBoard."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        """`start_step` steps are done; lines of later steps, from a lost run, are dropped."""
        # a run that starts afresh keeps nothing, not even the evaluation at step 0
        last = start_step or -1
        self.metrics = JSONLines(folder / "metrics.jsonl", up_to_step=last)
        self.evaluations = JSONLines(folder / "eval.jsonl", up_to_step=last)
        self.samples = JSONLines(folder / "samples.jsonl", up_to_step=last)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1)

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """Evaluations from before the resume."""
        return self.evaluations.kept

    def step(self, step: int, values: Scalars) -> None:
        self.metrics.write({"step": step, **values})
        for name, value in values.items():
            self.board.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def evaluation(self, step: int, values: Scalars) -> None:
        self.evaluations.write({"step": step, **values})
        for name, value in values.items():
            if name != "n" and not name.startswith("count/"):
                self.board.add_scalar(f"eval/{name}", value, step)

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        self.samples.write({"step": step, **record})

    def sample_text(self, step: int, text: str) -> None:
        self.board.add_text("samples", text, step)

    def close(self) -> None:
        for file in (self.metrics, self.evaluations, self.samples, self.board):
            file.close()


class NoLog:
    """The log of all processes but the main one: it does nothing."""

    evaluated: list[dict[str, Any]] = []  # noqa: RUF012 - nothing is ever added

    def step(self, step: int, values: Scalars) -> None: ...

    def evaluation(self, step: int, values: Scalars) -> None: ...

    def sample(self, step: int, record: Mapping[str, Any]) -> None: ...

    def sample_text(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


class Screen:
    """The console: messages, and progress as a bar on a terminal or as lines elsewhere.

    Only the main process prints messages. Every process may warn; the warning names its rank.
    """

    def __init__(self, *, quiet: bool = False, rank: int = 0) -> None:
        self.rank, quiet = rank, quiet or rank > 0
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.errors = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
        )
        times = (
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.progress = Progress(
            *columns, TextColumn("{task.description}"), *times, console=self.console
        )
        self.live = self.console.is_terminal and not quiet
        self.last_line = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        self.errors.print(f"warning{where}: {text}", style="yellow", markup=False)

    @contextmanager
    def reading(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress while reading a file; call the result with the bytes read so far."""
        columns = (
            TextColumn("reading {task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
        )
        bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
        task, last_line = bar.add_task(name, total=total), time.perf_counter()

        def update(done: int) -> None:
            nonlocal last_line
            bar.update(task, completed=done)
            if not self.live and time.perf_counter() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = time.perf_counter()
                self.say(f"reading {name}: {done / max(1, total):.0%}")

        if self.live:
            bar.start()
        try:
            yield update
        finally:
            if self.live:
                bar.stop()

    def start(self, total: int, done: int) -> None:
        self.first, self.began = done, time.perf_counter()
        self.task = self.progress.add_task("", total=total, completed=done)
        if self.live:
            self.progress.start()

    def update(self, done: int, total: int, text: str) -> None:
        self.progress.update(self.task, completed=done, description=text)
        now = time.perf_counter()
        if not self.live and (now - self.last_line >= SECONDS_BETWEEN_LINES or done == total):
            self.last_line = now
            left = (now - self.began) / max(1, done - self.first) * (total - done)
            self.say(f"step {done}/{total}  {text}  left {int(left) // 60}:{int(left) % 60:02d}")

    def stop(self) -> None:
        if self.live:
            self.progress.stop()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far: allocated on the CUDA device, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

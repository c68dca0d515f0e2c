"""The console, the phase timer, and the peak memory.

Everything that a training run prints goes through `Screen`; announce.py holds the messages, and
log_files.py writes the logs.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from .failures import reason_of
from .flags import ConfigError

SECONDS_BETWEEN_LINES = 15.0  # between progress lines, where there is no bar
NARROW = 60  # a terminal with fewer columns has no room for a bar
USUAL_WIDTH = 80  # of a terminal that does not say


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


class OutputStream:
    """Standard output or error. A closed pipe or a full disk behind it does not end the run."""

    def __init__(
        self,
        name: str,
        on_failure: Callable[[str], object] = lambda text: None,
        *,
        required: bool = False,
    ) -> None:
        """`name` is stdout or stderr; `on_failure` gets a message when it cannot be written.

        If it is `required`, a failed write raises ConfigError, unless the reader has gone.
        """
        self.name, self.on_failure, self.required = name, on_failure, required
        self.failed = False

    @property
    def stream(self) -> Any:
        """The stream of this moment: rich's progress bar, tests and notebooks replace it."""
        stream = getattr(sys, self.name) or io.StringIO()  # None if the process has no such stream
        return getattr(stream, "rich_proxied_file", stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self.stream.flush())

    def _try(self, action: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.failed = True
            self._point_elsewhere()
            if self.required and not isinstance(error, BrokenPipeError):  # `| head` has read enough
                raise ConfigError(f"{self.name}: cannot be written ({reason_of(error)})") from None
            self.on_failure(f"nothing more is printed: {self.name} failed ({reason_of(error)})")

    def _point_elsewhere(self) -> None:
        """Send what is still buffered to nowhere, or Python would fail when it flushes at exit."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


class Screen:
    """The console: messages, and progress as a bar on a terminal or as lines elsewhere.

    Elsewhere is a pipe, a file, a dumb terminal, or a narrow one. Only the main process prints
    messages. Every process may warn; the warning names its rank.
    """

    def __init__(self, *, quiet: bool = False, rank: int = 0, has_result: bool = False) -> None:
        """`has_result`: what is printed is the result, so it is an error if that is not possible.

        A training run has its result on the disk, and goes on without a screen.
        """
        self.rank, quiet = rank, quiet or rank > 0
        out, errors = OutputStream("stdout", self.warn, required=has_result), OutputStream("stderr")
        self.console = Console(file=cast(Any, out), quiet=quiet, highlight=False, soft_wrap=True)
        self.errors = Console(file=cast(Any, errors), highlight=False, soft_wrap=True)
        for console in (self.console, self.errors):
            if console.width < 1:  # COLUMNS=0: unknown; nothing would be shown
                console.width = USUAL_WIDTH
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.progress = Progress(*columns, console=self.console, expand=True)
        can_move = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = can_move and self.console.width >= NARROW and not quiet
        self.last_line = 0.0

    def say(self, text: str, *, style: str = "", wrap: bool = False) -> None:
        """Print a text as one line; on a terminal, `wrap` breaks it between words."""
        folds = wrap and self.console.is_terminal
        self.console.print(Text(text, style=style), soft_wrap=not folds)

    def warn(self, text: str) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        line = Text(f"warning{where}: {text}", style="yellow")
        self.errors.print(line, soft_wrap=not self.errors.is_terminal)

    @contextmanager
    def reading(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress while reading a file; call the result with the bytes read so far."""
        columns = (
            TextColumn("reading {task.description}", markup=False),
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

    def table(
        self, title: str, columns: list[str], rows: list[list[str]], *, narrow: bool = False
    ) -> None:
        """Print a table, `narrow` without lines between columns.

        Where there are few columns and it does not fit, its rows are printed as lines.
        Nothing in it is markup: a reward may be named `[/b]`.
        """
        lines: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False} if narrow else {}
        table = Table(title=Text(title), title_justify="left", **lines)
        for i, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        unbounded = self.console.options.update(max_width=10_000)
        needed = Measurement.get(self.console, unbounded, table).maximum
        if needed <= self.console.width or self.console.width >= NARROW:
            self.console.print(table)
            return
        self.say(title, wrap=True)
        names = [column.replace("\n", " ") for column in columns]
        for row in rows:
            cells = [(name, cell) for name, cell in zip(names, row, strict=True) if cell]
            self.say("  " + " ".join(f"{name} {cell}".strip() for name, cell in cells), wrap=True)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far: allocated on the CUDA device, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

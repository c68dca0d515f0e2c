"""What the benchmarks measure with: the machine, peak memory, medians with intervals, tables."""

import ctypes
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

STATUS = Path("/proc/self/status")  # Linux only
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Outputs:
    out_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write the tables to this folder too."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures to this file too."""


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """The peak of memory in use within a `with`, above what was in use before: `.mib`.

    Counts allocations on a CUDA device, elsewhere the resident memory of the process (Linux only).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib = float("nan")

    def __enter__(self) -> "PeakMemory":
        self.before = self._restart()  # MiB
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = max(self._peak() - self.before, self.mib)  # max returns the first if mib is NaN

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is used within this."""
        self.__exit__()
        yield
        self._restart()

    def _restart(self) -> float:
        """Forget the peak so far; MiB in use now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device) / 2**20
        if not CLEAR.exists():
            return 0.0
        # otherwise allocations that reuse freed memory would not show as growth
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")  # resets VmHWM
        return _resident("VmRSS")

    def _peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return _resident("VmHWM") if CLEAR.exists() else float("nan")


def _resident(field: str) -> float:
    """MiB of a field in STATUS."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 2**10


@dataclass(frozen=True)
class Median:
    """A median and its interval; the ends are NaN if there are too few values.

    The interval has a confidence of at least 95 % and assumes nothing about the noise: the true
    median lies between the k-th smallest and the k-th largest of n values, except with probability
    2 * P(Binomial(n, 1/2) < k).
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        ordered = sorted(values)
        n = len(ordered)
        k = 0
        while 2 * sum(comb(n, i) for i in range(k + 1)) <= 0.05 * 2**n:
            k += 1
        low, high = (ordered[k - 1], ordered[n - k]) if k else (math.nan, math.nan)
        return cls(median(ordered), low, high)

    def text(self, pattern: str = "{:.2f}") -> str:
        middle = pattern.format(self.middle)
        if math.isnan(self.low):
            return middle
        return f"{middle} ({pattern.format(self.low)}-{pattern.format(self.high)})"

    def verdict(self) -> str:
        """A gain in words: a factor, slower, or no difference. Less than 1 % counts as none."""
        if math.isnan(self.low):
            return f"{self.middle:.2f}x; too few turns for an interval"
        if self.low <= 1 <= self.high or abs(self.middle - 1) < 0.01:
            return f"no difference ({self.low:.2f}-{self.high:.2f}x)"
        return f"{'slower: ' if self.high < 1 else ''}{self.text()}x"


def gain(before: Mapping[int, float], now: Mapping[int, float]) -> Median | None:
    """How many times as fast `now` is as `before`, both seconds by turn.

    Turns are paired, because all rows sample the same prompts in one, one after another: neither
    the prompts nor a machine that slows down for a while count as a difference.
    """
    ratios = [before[turn] / now[turn] for turn in now if turn in before]
    return Median.of(ratios) if ratios else None


Column = tuple[str, str, str]  # heading, key in a row, pattern of its value


def show(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> str:
    """Print rows as a table, and return it as Markdown.

    What is missing or NaN is empty, and columns that are empty are left out.
    """
    cells = []
    for heading, key, pattern in columns:
        values = [row.get(key, math.nan) for row in rows]
        cells.append([heading, *["" if x != x or x is None else pattern.format(x) for x in values]])
    headings, *lines = zip(*[column for column in cells if any(column[1:])], strict=True)
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    alignment = ["---", *["--:"] * (len(headings) - 1)]
    markdown = [f"| {' | '.join(line)} |" for line in (headings, alignment, *lines)]
    return f"## {title}\n\n" + "\n".join(markdown) + "\n"

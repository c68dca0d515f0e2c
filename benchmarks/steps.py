"""What each speed layer gains: `python benchmark.py`, or `python benchmark.py steps`.

The first row is grpo.py's step, the second the library without its speed layers, and each further
row adds one layer. All rows sample the same tokens for the same prompts. A learning rate close to
zero keeps their weights equal, although the whole step runs. On CPU the rows are interleaved, A B C
A B C, so that a machine that slows down slows all of them. intervals.py says when two rows differ.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from minigrpo.runtime import accel
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.oom import is_out_of_memory

from . import probe
from .bench_step import BenchStep
from .flags import Positive, PositiveOrZero
from .grpo_step import GrpoPyStep
from .layers import RowSpec, alone, stacked
from .report import write_report
from .roofline import Roofline
from .rows import Baseline, Comparisons, Row, records
from .workload import Workload, WorkloadFlags

FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are


@dataclass(frozen=True)
class Steps(WorkloadFlags):
    """Seconds per step, one speed layer more in each row, with its effect on loss, gradient and
    memory.
    """

    full: bool = False
    """Print a second table, with each layer alone."""
    only: tuple[str, ...] = ()
    """Run only grpo.py and the rows whose names contain one of these words; each row still has the
    layers of the omitted rows above it.
    """
    repeats: Positive = 6
    """Timed steps per row, after two that warm up; 6 are the fewest for an interval of 95 %."""
    max_repeats: Positive = 12
    """A row whose interval is wider than 6 % takes more steps than --repeats, up to this number."""
    max_seconds: PositiveOrZero = 300
    """No step beyond --repeats begins later than this many seconds after the first row."""
    out_dir: Path | None = None
    """Folder for tables, charts and figures; default: benchmarks/results/<device>-<date>."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        device = accel.pick_device(self.device)
        work = Workload.of(self, device)
        tables = {"rows": self._chosen(stacked(work, as_configured=bool(self.config)))}
        if self.full:
            tables["alone"] = self._chosen(alone(work))
        console.print(f"{probe.device_name(device)}: {work.describe()}", highlight=False)
        result = {
            **probe.describe_machine(device),
            "made_by": probe.made_by(self.command()),
            "work": work.to_dict(),
        }
        for name, specs in tables.items():
            result[name] = self._measure(work, specs, console)
        write_report(result, self.out_dir, console)
        return result

    def _chosen(self, specs: list[RowSpec]) -> list[tuple[RowSpec, bool]]:
        """Each row, and whether --only wants it. Raises ConfigError for a word in no row's name."""
        for word in self.only:
            if not any(word in spec.name for spec in specs):
                names = ", ".join(spec.name.strip("()") for spec in specs)
                raise ConfigError(f"--only {word!r}: no row has this in its name; rows: {names}")
        words = self.only
        return [
            (spec, not words or spec.is_grpo_py or any(word in spec.name for word in words))
            for spec in specs
        ]

    def _measure(
        self, work: Workload, specs: list[tuple[RowSpec, bool]], console: Console
    ) -> list[dict[str, Any]]:
        rows = [Row(spec, spec.status) for spec, wanted in specs if wanted]
        baseline, deadline = Baseline(), time.perf_counter() + self.max_seconds
        comparisons = Comparisons(rows, [spec for spec, _ in specs])
        # a GPU has no room for the models of all rows, so there they run one after the other
        groups = [rows] if work.device.type == "cpu" else [[row] for row in rows]
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(f"{len(rows)} rows", total=(1 + self.repeats) * len(rows))

            def run(row: Row, job: Callable[[Row], None]) -> None:
                _attempt(row, job)
                progress.advance(bar)

            for group in groups:
                for row in group:
                    run(row, partial(_warm_up, work=work, baseline=baseline))
                turn = 1
                while due := self._due(group, turn, comparisons, deadline):
                    for row in due:
                        run(row, partial(_time_step, turn=turn, baseline=baseline))
                    turn += 1
                for row in group:
                    _release(row)
        return list(records(rows, comparisons, Roofline.probed(work)))

    def _due(
        self, group: list[Row], turn: int, comparisons: Comparisons, deadline: float
    ) -> list[Row]:
        """The rows of a group that run in this turn.

        Beyond --repeats these are the rows whose interval is wide, and those that they are compared
        with.
        """
        rows = [row for row in group if row.status == "ok"]
        if turn <= self.repeats:
            return rows
        if turn > self.max_repeats or time.perf_counter() > deadline:
            return []
        due = list[Row]()
        for row in filter(comparisons.is_wide, rows):
            before = comparisons.before(row) or row
            # a row of another group is over: only the turns that it ran can be paired
            if before in group or turn in before.steps:
                due += [row, before]
        return [row for row in rows if row in due]


def _attempt(row: Row, job: Callable[[Row], None]) -> None:
    """Run a job of a row; running out of memory becomes the row's status."""
    if row.status != "ok":
        return
    try:
        job(row)
    except ConfigError as error:
        row.status = str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        row.status = "out of memory"
    if row.status != "ok":
        _release(row)


def _release(row: Row) -> None:
    row.bench = None
    gc.collect()  # compiled blocks refer to themselves
    torch.cuda.empty_cache()


def _warm_up(row: Row, work: Workload, baseline: Baseline) -> None:
    """Build the row's step, run it twice, and compare its loss and gradient."""
    config = work.config.replace(**row.spec.flags, learning_rate=FROZEN_LR)
    with probe.PeakMemory(work.device) as memory:
        start = time.perf_counter()
        row.bench = GrpoPyStep(config, work) if row.spec.is_grpo_py else BenchStep(config, work)
        row.bench.step(0)
        row.warm_up_s = time.perf_counter() - start
    resident = 0.0
    if work.device.type == "cuda":
        resident = torch.cuda.memory_allocated(work.device) / 2**20 - memory.before
    # not in a timed step: measuring the peak returns freed memory to the system, which takes time
    with probe.PeakMemory(work.device) as peak:
        row.bench.step(0)
    row.peak_mib = peak.mib + resident
    row.loss_difference, row.grad_difference = baseline.compare(row.bench)


def _time_step(row: Row, turn: int, baseline: Baseline) -> None:
    assert row.bench is not None
    graphs = accel.graphs_compiled()
    row.steps[turn] = row.bench.step(turn)
    row.recompiles += accel.graphs_compiled() - graphs
    baseline.count_different(row, turn, row.bench.tokens())

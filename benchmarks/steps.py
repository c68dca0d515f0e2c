"""What each speed layer gains: `python benchmark.py`, or `python benchmark.py steps`.

The first row is grpo.py's step, the second the library without its speed layers, and each further
row adds one layer. All rows sample the same tokens for the same prompts. A learning rate close to
zero keeps their weights equal, although the whole step runs. On CPU the rows are interleaved, A B C
A B C, so that a machine that slows down slows all of them.
"""

import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from minigrpo.config import Config
from minigrpo.runtime import accel
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.oom import is_out_of_memory
from minigrpo.types import RolloutBatch

from . import probe
from .bench_step import BenchStep, MeasuredStep
from .grpo_step import GrpoPyStep
from .layers import RowSpec, alone, stacked
from .report import write_report
from .roofline import Roofline, StepWork
from .workload import Workload, WorkloadFlags

FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are
PHASES = ("rollout", "reward", "reference", "update")


@dataclass
class Row:
    """The measurements of a row."""

    spec: RowSpec
    status: str
    bench: MeasuredStep | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    peak_mib: float = math.nan
    warm_up_s: float = 0.0
    recompiles: int = 0
    different: int = 0  # completions that differ from the first row's
    loss_difference: float = math.nan
    grad_difference: float = math.nan

    def median(self, name: str) -> float:
        """The median over the timed steps; NaN if the row did not run."""
        if self.status != "ok" or not self.steps:
            return math.nan
        return median(step.get(name, 0.0) for step in self.steps)


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
    repeats: int = 5
    """Timed steps per row, after two that warm up."""
    out_dir: Path | None = None
    """Folder for tables, charts and figures; default: benchmarks/results/<device>-<date>."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        device = accel.pick_device(self.device)
        work = Workload.of(self, device)
        console.print(f"{probe.device_name(device)}: {work.describe()}", highlight=False)
        result = {
            **probe.describe_machine(device),
            "work": work.to_dict(),
            "rows": self._measure(work, stacked(device), console),
        }
        if self.full:
            result["alone"] = self._measure(work, alone(device), console)
        write_report(result, self.out_dir, console)
        return result

    def _measure(
        self, work: Workload, specs: list[RowSpec], console: Console
    ) -> list[dict[str, Any]]:
        rows = [Row(spec, spec.status) for spec in specs if self._is_wanted(spec)]
        jobs, baseline = list[tuple[Row, Callable[[Row], None]]](), Baseline()
        # a GPU has no room for the models of all rows, so there they run one after the other
        for together in [rows] if work.device.type == "cpu" else [[row] for row in rows]:
            jobs += [(row, partial(_warm_up, work=work, baseline=baseline)) for row in together]
            jobs += [
                (row, partial(_time_step, turn=turn + 1, baseline=baseline))
                for turn in range(self.repeats)
                for row in together
            ]
            jobs += [(row, _release) for row in together]
        for row, job in track(jobs, f"{len(rows)} rows", console=console, transient=True):
            _attempt(row, job)
        return list(_records(rows, Roofline.probed(work)))

    def _is_wanted(self, spec: RowSpec) -> bool:
        return not self.only or spec.is_grpo_py or any(word in spec.name for word in self.only)


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


def _warm_up(row: Row, work: Workload, baseline: "Baseline") -> None:
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


def _time_step(row: Row, turn: int, baseline: "Baseline") -> None:
    assert row.bench is not None
    graphs = accel.graphs_compiled()
    row.steps.append(row.bench.step(turn))
    row.recompiles += accel.graphs_compiled() - graphs
    row.different += baseline.count_different(turn, row.bench.tokens())


class Baseline:
    """Tokens, loss and gradient of the first row that ran; the others are compared with them."""

    def __init__(self) -> None:
        self.tokens: dict[int, Tensor] = {}  # by turn
        self.first: tuple[RolloutBatch, float, list[Tensor]] | None = None

    def count_different(self, turn: int, ids: Tensor) -> int:
        """How many completions of a turn differ, of `[P * G, S]`."""
        return int((ids != self.tokens.setdefault(turn, ids)).any(-1).sum())

    def compare(self, bench: MeasuredStep) -> tuple[float, float]:
        """Relative differences of loss and gradient, both on the first row's rollout."""
        batch = bench.batch if self.first is None else self.first[0]
        loss, gradient = bench.gradient(batch)
        gradient = [g.to("cpu", torch.float64) for g in gradient]
        if self.first is None:
            self.first = batch, loss, gradient
        _, first_loss, first_gradient = self.first
        apart = _norm([a - b for a, b in zip(gradient, first_gradient, strict=True)])
        return abs(loss - first_loss) / (abs(first_loss) or 1), apart / (_norm(first_gradient) or 1)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in tensors))


def _work_of(row: Row, group_size: int) -> StepWork:
    flags = row.spec.flags
    return StepWork(
        completions=row.median("completions"),
        completion_len=row.median("completion_len"),
        rounds=row.median("rollout/rounds"),
        tokens_rollout=row.median("rollout/tokens"),
        tokens_update=row.median("tokens/run"),
        prompt_copies=group_size if row.spec.is_grpo_py else 1,
        precision="amp" if flags["use_amp"] else "tf32" if flags["use_tf32"] else "float32",
    )


def _records(rows: list[Row], roof: Roofline) -> Iterator[dict[str, Any]]:
    """The figures of each row as plain JSON; what was not measured is null."""
    default, first = Config().flat(), rows[0].median("seconds")
    for row in rows:
        step = _work_of(row, roof.work.config.sampling.group_size)
        least, least_flops = roof.seconds(step)
        seconds = row.median("seconds")
        record = {
            "name": row.spec.name,
            "flags": {name: x for name, x in row.spec.flags.items() if x != default[name]},
            "s_per_step": seconds,
            "samples": [timed["seconds"] for timed in row.steps],
            **{name: row.median(name) for name in PHASES},
            "tokens_per_s": step.completions * step.completion_len / seconds,
            "speedup": first / seconds,
            "peak_mib": row.peak_mib,
            "memory_measures": probe.PeakMemory(roof.work.device).measures,
            "loss_difference": row.loss_difference,
            "grad_difference": row.grad_difference,
            "roofline_multiple": seconds / least,
            "flops_multiple": seconds / least_flops,
            "rounds": step.rounds,
            "rounds_each": row.median("rollout/rounds_each"),
            "tokens_rollout": step.tokens_rollout,
            "tokens_update": step.tokens_update,
            "different_completions": row.different,
            "completions": sum(int(timed["completions"]) for timed in row.steps),
            "warm_up_s": row.warm_up_s,
            "recompiles": row.recompiles,
            "status": row.status,
        }
        yield json.loads(json.dumps(record).replace("NaN", "null").replace("Infinity", "null"))

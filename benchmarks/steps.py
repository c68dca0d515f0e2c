"""What each speed layer gains: `python benchmark.py`, or `python benchmark.py steps`.

The first row is grpo.py's step, the second the library without its speed layers, and each further
row adds one layer. All rows sample the same tokens for the same prompts. A learning rate close to
zero keeps their weights equal, although the whole step runs. On a CPU the rows are interleaved,
A B C A B C, so that a machine that slows down slows all of them.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from minigrpo.types import ConfigError, RolloutBatch

from .grpo_step import GrpoPyStep
from .measure import Column, Median, PeakMemory, device_name, gain, number, show
from .work import FROZEN_LR, Step, Work, WorkFlags

GRPO_PY = "grpo.py"
SWITCHES = (
    *("fused_optimizer", "parallel_rewards", "use_amp", "use_tf32", "compile_model"),
    *("gradient_checkpointing", "offload_reference"),
)
# every speed layer off, regardless of defaults and config
PLAIN = {"packing": "repeated", "num_speculative_tokens": 0, **dict.fromkeys(SWITCHES, False)}


@dataclass(frozen=True)
class Layer:
    """What a row adds to the rows above it."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    only_on: str = ""  # a kind of device
    kept_on: tuple[str, ...] = ("cpu", "cuda")  # where the rows below keep it


LAYERS = (
    Layer(GRPO_PY),
    Layer("the library, no speed layers"),
    Layer("rewards in a pool", {"parallel_rewards": True}),
    Layer("fused AdamW", {"fused_optimizer": True}),
    Layer("prefix-tree packing", {"packing": "prefix-tree"}),
    Layer("speculative decoding", {"num_speculative_tokens": 4}),
    Layer("TF32", {"use_tf32": True}, only_on="cuda"),
    # not kept on a CPU, so that the rows below sample the same completions as grpo.py
    Layer("bfloat16 autocast", {"use_amp": True}, kept_on=("cuda",)),
    Layer("torch.compile", {"compile_model": True}, kept_on=("cuda",)),
    Layer("gradient checkpointing", {"gradient_checkpointing": True}, kept_on=()),
    Layer("offloaded reference", {"offload_reference": True}, kept_on=()),
    Layer("one prompt at a time", {"micro_batch_size": 1}, kept_on=()),
)
PHASES = ("rollout", "reward", "reference", "update")
COLUMNS: tuple[Column, ...] = (
    ("", "name", str),
    ("s/step", "s/step", str),
    *((phase, phase, number("{:.3f}")) for phase in PHASES),
    ("speedup", "speedup", str),
    ("gain over the row above", "verdict", str),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("tokens: rollout", "rollout/tokens", number("{:,.0f}")),
    ("update", "tokens/run", number("{:,.0f}")),
    ("rounds", "rollout/rounds", number("{:,.0f}")),
    ("gradient off by", "grad_difference", number("{:.0e}")),
    ("other completions", "different", number("{}")),
    ("", "status", str),
)


@dataclass
class Row:
    """A row's step, and what was measured of it."""

    name: str
    flags: dict[str, Any]
    over: "Row | None"  # the row whose layers it adds one to
    status: str = ""  # why it did not run
    step: GrpoPyStep | Step | None = None
    times: dict[int, dict[str, float]] = field(default_factory=dict)  # by turn
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)  # by turn
    peak_mib: float = math.nan
    grad_difference: float = math.nan

    @property
    def seconds(self) -> dict[int, float]:
        return {turn: time["seconds"] for turn, time in self.times.items()}


class Baseline(NamedTuple):
    """A rollout and its gradient, which the gradients of all rows are compared with."""

    batch: RolloutBatch
    gradient: list[torch.Tensor]  # in float64 on the CPU, one for each weight


@dataclass(frozen=True)
class Steps(WorkFlags):
    """Seconds per step, one speed layer more in each row, and each layer's peak memory."""

    only: tuple[str, ...] = ()
    """Run only grpo.py and the rows whose names contain one of these words."""
    repeats: int = 6
    """Timed steps per row, after two that warm up; 6 are the fewest for an interval of 95 %."""

    def run(self, console: Console) -> dict[str, Any]:
        work = Work.of(self)
        title = f"{device_name(work.device)}: {work.describe()}"
        console.print(title, highlight=False)
        rows = [row for row in rows_of(work, configured=bool(self.config)) if self._wants(row)]
        # a GPU has no room for the models of all rows, so there they run one after the other
        groups = [rows] if work.device.type == "cpu" else [[row] for row in rows]
        baseline: Baseline | None = None
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("steps", total=(1 + self.repeats) * len(rows))
            for group in groups:
                for row in group:
                    baseline = _begin(row, work, baseline)
                    progress.advance(bar)
                for turn in range(1, self.repeats + 1):
                    for row in group:
                        _take_turn(row, turn)
                        progress.advance(bar)
                for row in group:
                    row.step = None
                gc.collect()
                torch.cuda.empty_cache()
        records = [_record(row, rows[0]) for row in rows]
        table = show(console, title, records, COLUMNS)
        return {"device": device_name(work.device), "rows": records, "tables": [table]}

    def _wants(self, row: Row) -> bool:
        return not self.only or row.name == GRPO_PY or any(word in row.name for word in self.only)


def rows_of(work: Work, *, configured: bool) -> Iterator[Row]:
    """Every layer on top of the layers above it that this device keeps."""
    kind = work.device.type
    flags = PLAIN
    above: Row | None = None
    for layer in LAYERS:
        if layer.only_on not in ("", kind):
            continue
        keeps = kind in layer.kept_on
        added = {**flags, **layer.flags}
        row = Row(layer.name if keeps else f"({layer.name})", added, above)
        yield row
        if keeps:
            flags = added
            above = row
    if configured:
        own = {name: work.config.flat()[name] for name in PLAIN}
        yield Row("as configured", own, above)


@contextmanager
def _noting_failure(row: Row) -> Iterator[None]:
    """What ends a row becomes its status; the other rows go on."""
    try:
        yield
    except (ConfigError, MemoryError, RuntimeError) as error:
        row.status = str(error).splitlines()[0][:80]
        row.step = None


def _begin(row: Row, work: Work, baseline: Baseline | None) -> Baseline | None:
    """Build a row, warm it up, measure its memory, and compare gradients on one rollout.

    Returns the baseline, which the first row of the library makes.
    """
    with _noting_failure(row):
        config = work.config.replace(**row.flags, learning_rate=FROZEN_LR)
        before = _allocated(work.device)
        row.step = GrpoPyStep(config, work) if row.name == GRPO_PY else Step(config, work)
        row.step.step(0)
        resident = _allocated(work.device) - before
        # not in a timed step: measuring the peak returns freed memory, which takes time
        with PeakMemory(work.device) as peak:
            row.step.step(0)
        row.peak_mib = peak.mib + resident / 2**20
        if isinstance(row.step, GrpoPyStep):  # its gradient is the library's: tests/test_grpo.py
            return baseline
        batch = baseline.batch if baseline else row.step.batch
        gradient = [g.cpu().double() for g in row.step.gradient(batch)[1]]
        baseline = baseline or Baseline(batch, gradient)
        norm = torch.nn.utils.get_total_norm
        apart = norm([a - b for a, b in zip(gradient, baseline.gradient, strict=True)])
        row.grad_difference = float(apart) / (float(norm(baseline.gradient)) or 1)
    return baseline


def _take_turn(row: Row, turn: int) -> None:
    with _noting_failure(row):
        if row.step:
            row.times[turn] = row.step.step(turn)
            row.tokens[turn] = row.step.tokens()


def _allocated(device: torch.device) -> int:
    """Bytes in use on a CUDA device; 0 elsewhere."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _record(row: Row, first: Row) -> dict[str, Any]:
    """The figures of a row as plain JSON."""
    record: dict[str, Any] = {"name": row.name, "flags": row.flags, "status": row.status}
    if row.status or not row.times:
        return record
    for name in ("seconds", *PHASES, "rollout/tokens", "tokens/run", "rollout/rounds"):
        record[name] = median(times.get(name, 0.0) for times in row.times.values())
    above = row.over
    while above and not above.times:  # it has failed
        above = above.over
    speedup = gain(first.seconds, row.seconds)
    gained = gain(above.seconds, row.seconds) if above else None
    turns = first.tokens.keys() & row.tokens.keys()
    others = [(row.tokens[turn] != first.tokens[turn]).any(-1).sum() for turn in turns]
    return record | {
        "s/step": Median.of([*row.seconds.values()]).text(),
        "speedup": speedup.text("{:.1f}") + "x" if speedup else "",
        "verdict": gained.verdict() if gained else "",
        "peak_mib": row.peak_mib,
        "grad_difference": row.grad_difference,
        "different": int(sum(others)),
    }

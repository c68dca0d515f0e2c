"""A row of the steps benchmark: what was measured, and how it compares with other rows."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from minigrpo.config import Config
from minigrpo.types import RolloutBatch

from . import probe
from .bench_step import MeasuredStep
from .intervals import Median, gain, median_of
from .layers import RowSpec
from .roofline import Roofline, StepWork

PHASES = ("rollout", "reward", "reference", "update")


@dataclass
class Row:
    """The measurements of a row."""

    spec: RowSpec
    status: str
    bench: MeasuredStep | None = None
    steps: dict[int, dict[str, float]] = field(default_factory=dict)  # timed, by turn
    peak_mib: float = math.nan
    warm_up_s: float = 0.0
    recompiles: int = 0
    different: int = 0  # completions that differ from the first row's
    compared: int = 0  # completions that were compared with them
    loss_difference: float = math.nan
    grad_difference: float = math.nan

    @property
    def is_timed(self) -> bool:
        return self.status == "ok" and bool(self.steps)

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds per step, by turn; empty if the row did not run to its end."""
        return {turn: step["seconds"] for turn, step in self.steps.items() if self.status == "ok"}

    def median(self, name: str) -> float:
        """The median over the timed steps; NaN if the row did not run."""
        if not self.is_timed:
            return math.nan
        return median(step.get(name, 0.0) for step in self.steps.values())


class Baseline:
    """Tokens, loss and gradient of the first row that ran; the others are compared with them."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.tokens: dict[int, Tensor] = {}  # by turn
        self.first: tuple[RolloutBatch, float, list[Tensor]] | None = None

    def count_different(self, row: Row, turn: int, ids: Tensor) -> None:
        """Count the completions of a turn that differ, of `[P * G, S]`, if the first row ran it."""
        self.row = self.row or row
        if row is self.row:
            self.tokens[turn] = ids
        if turn in self.tokens:
            row.different += int((ids != self.tokens[turn]).any(-1).sum())
            row.compared += len(ids)

    def compare(self, bench: MeasuredStep) -> tuple[float, float]:
        """Relative differences of loss and gradient, both on the first row's rollout."""
        batch = bench.batch if self.first is None else self.first[0]
        loss, gradient = bench.gradient(batch)
        gradient = [g.to("cpu").double() for g in gradient]
        if self.first is None:
            self.first = batch, loss, gradient
        _, first_loss, first_gradient = self.first
        apart = _norm([a - b for a, b in zip(gradient, first_gradient, strict=True)])
        return abs(loss - first_loss) / (abs(first_loss) or 1), apart / (_norm(first_gradient) or 1)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in tensors))


class Comparisons:
    """Which row each row is compared with: the one that it adds a layer to, if that was timed."""

    def __init__(self, rows: list[Row], specs: list[RowSpec]) -> None:
        self.rows = {row.spec.name: row for row in rows}
        self.over = {spec.name: spec.over for spec in specs}

    def before(self, row: Row) -> Row | None:
        """The nearest row above that ran; None for the first."""
        name = self.over[row.spec.name]
        while name:
            if name in self.rows and self.rows[name].is_timed:
                return self.rows[name]
            name = self.over[name]
        return None

    def gain(self, row: Row) -> Median | None:
        """How many times as fast a row is as the one before it."""
        before = self.before(row)
        return gain(before.seconds, row.seconds) if before else None

    def is_wide(self, row: Row) -> bool:
        """Whether the row's gain, or its time if it is the first row, needs more turns."""
        found = self.gain(row) or median_of(list(row.seconds.values()))
        return found.is_wide


def records(rows: list[Row], comparisons: Comparisons, roof: Roofline) -> Iterator[dict[str, Any]]:
    """The figures of each row as plain JSON; what was not measured is null."""
    for row in rows:
        record = {
            "name": row.spec.name,
            "is_default": row.spec.is_default,
            "flags": _flags(row),
            "status": row.status,
            **_times(row, rows[0], comparisons),
            **_costs(row, roof),
        }
        yield json.loads(json.dumps(record).replace("NaN", "null").replace("Infinity", "null"))


def _flags(row: Row) -> Mapping[str, Any]:
    default = Config().flat()
    return {name: x for name, x in row.spec.flags.items() if x != default[name]}


def _times(row: Row, first: Row, comparisons: Comparisons) -> dict[str, Any]:
    """Seconds per step, speedup over the first row and gain over the row before, with intervals."""
    seconds = list(row.seconds.values())
    time = median_of(seconds) if seconds else None
    speedup, gained = gain(first.seconds, row.seconds), comparisons.gain(row)
    before = comparisons.before(row)
    return {
        "s_per_step": time and time.middle,
        "s_per_step_interval": time and time.ends,
        "samples": seconds,
        "turns": list(row.seconds),
        **{name: row.median(name) for name in PHASES},
        "speedup": speedup and speedup.middle,
        "speedup_interval": speedup and speedup.ends,
        "gain_over": before.spec.name if before and gained else None,
        "gain": gained and gained.middle,
        "gain_interval": gained and gained.ends,
        "verdict": gained.verdict() if gained else "" if row.status == "ok" else row.status,
    }


def _costs(row: Row, roof: Roofline) -> dict[str, Any]:
    """Memory, distance to the first row, distance to the roofline, and counts of work."""
    step, seconds = _work_of(row, roof.work.config.sampling.group_size), row.median("seconds")
    least, least_flops = roof.seconds(step)
    return {
        "tokens_per_s": step.completions * step.completion_len / seconds,
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
        "completions": row.compared,
        "warm_up_s": row.warm_up_s,
        "recompiles": row.recompiles if row.is_timed else None,
    }


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

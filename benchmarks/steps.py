"""What each speed layer gains: `python benchmark.py`, or `python benchmark.py steps`.

The first row is grpo.py's step, the second the library without its speed layers, and each further
row adds one layer. All rows sample the same tokens for the same prompts, and so as many. A learning
rate close to zero keeps their weights equal, although the whole step runs. On a CPU the rows are
interleaved, A B C A B C, so that a machine that slows down slows all of them.
"""

import gc
import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from minigrpo.types import RolloutBatch

from .grpo_step import GrpoPyStep
from .measure import Column, Median, device_name, gain, number, show
from .work import FROZEN_LR, Step, Work, WorkFlags, allocated, peak_of

GRPO_PY = "grpo.py"
# name of a row -> the flags that it adds to those of the rows above it
LAYERS: dict[str, dict[str, Any]] = {
    GRPO_PY: {},
    "the library, no speed layers": {},
    "rewards in a pool": {"parallel_rewards": True},
    "fused AdamW": {"fused_optimizer": True},
    "prefix-tree packing": {"packing": "prefix-tree"},
    "speculative decoding": {"num_speculative_tokens": 4},
    # from here on, rows may sample other completions than grpo.py
    "bfloat16 autocast": {"use_amp": True},
    "TF32": {"use_tf32": True},
    "CUDA graphs of rounds": {"cuda_graphs": True},
    "torch.compile": {"compile_model": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "offloaded reference": {"offload_reference": True},
    "one prompt at a time": {"micro_batch_size": 1},
}
SWITCHES = {name for flags in LAYERS.values() for name, x in flags.items() if x is True}
# every speed layer off, regardless of defaults and config
PLAIN = {"packing": "repeated", "num_speculative_tokens": 0, **dict.fromkeys(SWITCHES, False)}
ONLY_ON_CUDA = ("TF32", "CUDA graphs of rounds", "torch.compile")
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
    ("tokens sampled", "completion_tokens", number("{:,.0f}")),
)


@dataclass
class Row:
    """A row's step, and what was measured of it."""

    name: str
    flags: dict[str, Any]
    step: GrpoPyStep | Step | None = None
    times: dict[int, dict[str, float]] = field(default_factory=dict)  # by turn
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

    repeats: int = 6
    """Timed steps per row, after two that warm up; 6 are the fewest for an interval of 95 %."""

    def run(self, console: Console) -> dict[str, Any]:
        work = Work.of(self)
        title = f"{device_name(work.device)}: {work.describe()}"
        rows = rows_on(work.device.type)
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
                        assert row.step is not None
                        row.times[turn] = row.step.step(turn)
                        progress.advance(bar)
                for row in group:
                    row.step = None
                gc.collect()
                torch.cuda.empty_cache()
        above = [rows[0], *rows]
        records = [_record(row, rows[0], over) for row, over in zip(rows, above, strict=False)]
        table = show(console, title, records, COLUMNS)
        return {"device": device_name(work.device), "rows": records, "tables": [table]}


def rows_on(kind: str) -> list[Row]:
    """Every layer of a kind of device, on top of the layers above it."""
    rows = list[Row]()
    flags = PLAIN
    for name, added in LAYERS.items():
        if kind == "cuda" or name not in ONLY_ON_CUDA:
            flags = {**flags, **added}
            rows.append(Row(name, flags))
    return rows


def _begin(row: Row, work: Work, baseline: Baseline | None) -> Baseline | None:
    """Build a row, warm it up, measure its memory, and compare gradients on one rollout.

    Returns the baseline, which the first row of the library makes.
    """
    config = work.config.replace(**row.flags, learning_rate=FROZEN_LR)
    before = allocated(work.device)
    row.step = GrpoPyStep(config, work) if row.name == GRPO_PY else Step(config, work)
    row.peak_mib = peak_of(row.step, work.device, before)
    if isinstance(row.step, GrpoPyStep):  # its gradient is the library's: tests/test_grpo.py
        return baseline
    batch = baseline.batch if baseline else row.step.batch
    gradient = [g.cpu().double() for g in row.step.gradient(batch)[1]]
    baseline = baseline or Baseline(batch, gradient)
    norm = torch.nn.utils.get_total_norm
    apart = norm([a - b for a, b in zip(gradient, baseline.gradient, strict=True)])
    row.grad_difference = float(apart) / (float(norm(baseline.gradient)) or 1)
    return baseline


def _record(row: Row, first: Row, above: Row) -> dict[str, Any]:
    """The figures of a row as plain JSON."""
    names = ("completion_tokens", "rollout/tokens", "tokens/run", "rollout/rounds")
    record: dict[str, Any] = {"name": row.name, "flags": row.flags}
    for name in ("seconds", *PHASES, *names):
        record[name] = median(times.get(name, 0.0) for times in row.times.values())
    speedup = gain(first.seconds, row.seconds)
    gained = gain(above.seconds, row.seconds) if row is not first else None
    return record | {
        "s/step": Median.of([*row.seconds.values()]).text(),
        "speedup": speedup.text("{:.1f}") + "x" if speedup else "",
        "verdict": gained.verdict() if gained else "",
        "peak_mib": row.peak_mib,
        "grad_difference": row.grad_difference,
    }

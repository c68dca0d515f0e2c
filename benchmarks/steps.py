"""What each layer buys: `python benchmark.py`, or `python benchmark.py steps`.

Rows add one layer each to the naive step of naive.py. All rows sample the same tokens for the same
prompts and keep the same weights (a learning rate of next to nothing: everything is run, nothing
moves). On CPU they take turns, A B C A B C, so that a machine that slows down slows all of them.
Forced work (the default) is random text on random weights, every completion as long as allowed;
--natural is the default job with its own model, lengths and rewards.
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
from minigrpo.types import RolloutBatch

from . import probe
from .report import write_report
from .workload import BenchStep, Workload, WorkloadFlags

FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are


@dataclass(frozen=True)
class Layer:
    """What one row adds to the rows above it."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    gives_up: frozenset[str] = frozenset()  # naive parts that this layer replaces by the library's
    needs: str = ""  # cuda: only there
    aside: tuple[str, ...] = ()  # kinds of devices on which the rows below go without it


NAIVE = frozenset({"sampler", "head", "rewards"})
PLAIN = {
    "packing": "repeated",
    "kv_cache": True,
    "share_prompt_kv": False,
    "cuda_graphs": False,
    "low_precision_weights": False,
    "speculative_decoding": False,
    "fused_optimizer": False,
    "parallel_rewards": False,
    "overlap_rewards": False,
    "skip_zero_variance_groups": False,
    "use_amp": False,
    "use_tf32": False,
    "compile_model": False,
    "gradient_checkpointing": False,
    "chunked_logprobs": False,
    "offload_reference": False,
    "rollout_batch_size": 0,
}
EVERYWHERE = ("cpu", "cuda")
LEAN = {
    "gradient_checkpointing": True,
    "chunked_logprobs": True,
    "offload_reference": True,
    "share_prompt_kv": True,
}
LAYERS = (
    Layer("naive"),
    Layer("one batch, each prompt run once", gives_up=frozenset({"sampler"})),
    Layer("completion-only head, no old-logp pass", gives_up=frozenset({"head"})),
    Layer(
        "distinct rewards once, in a pool",
        {"parallel_rewards": True},
        gives_up=frozenset({"rewards"}),
    ),
    Layer("fused AdamW", {"fused_optimizer": True}),
    Layer("dead groups left out", {"skip_zero_variance_groups": True}),
    Layer("shared packing", {"packing": "shared-prompt"}),
    Layer("keys and values of prompts shared", {"share_prompt_kv": True}, aside=EVERYWHERE),
    Layer("drafted decoding", {"speculative_decoding": True}),
    Layer("tree packing", {"packing": "prefix-tree"}),
    Layer("TF32", {"use_tf32": True}, needs="cuda"),
    Layer(
        "bfloat16 autocast", {"use_amp": True}, aside=("cpu",)
    ),  # there the rows below keep the naive one's completions
    Layer(
        "and matrices kept in bfloat16",
        {"use_amp": True, "low_precision_weights": True},
        aside=("cpu",),
    ),
    Layer("compiled blocks", {"compile_model": True}, aside=("cpu",)),
    Layer(
        "CUDA graphs", {"cuda_graphs": True}, needs="cuda", aside=EVERYWHERE
    ),  # never run on a GPU yet: not relied on
    Layer(
        "overlapped rewards", {"overlap_rewards": True, "rollout_batch_size": 4}, aside=EVERYWHERE
    ),
    Layer("chunked log-probs", {"chunked_logprobs": True}, aside=EVERYWHERE),
    Layer("checkpointing", {"gradient_checkpointing": True}, aside=EVERYWHERE),
    Layer("offloaded reference", {"offload_reference": True}, aside=EVERYWHERE),
    Layer(
        "lean: these four, one prompt at a time", {**LEAN, "micro_batch_size": 1}, aside=EVERYWHERE
    ),
)


@dataclass
class Row:
    """A set of flags, and what was measured of it."""

    name: str
    flags: dict[str, Any]
    naive: frozenset[str]
    status: str = "ok"
    machine: BenchStep | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    peak_mib: float = math.nan
    warm_up_s: float = 0.0
    recompiles: int = 0
    different: int = 0  # completions that are not the naive ones
    joules: list[float] = field(default_factory=list)
    loss_difference: float = math.nan
    grad_difference: float = math.nan

    def middle(self, name: str) -> float:
        return median(step.get(name, 0.0) for step in self.steps) if self.steps else math.nan


@dataclass(frozen=True)
class Steps(WorkloadFlags):
    """Seconds a step, each layer added to the naive step, with its effect on loss, gradient and
    memory.
    """

    full: bool = False
    """A second table with each layer alone."""
    only: tuple[str, ...] = ()
    """Only the naive row and rows whose names contain one of these words; the layers add up all the
    same.
    """
    repeats: int = 5
    """Timings of each row, after one that is not counted."""
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
            "rows": self._measure(work, _stacked(device), console),
        }
        if self.full:
            result["alone"] = self._measure(work, _alone(device), console)
        write_report(result, self.out_dir, console)
        return result

    def _measure(self, work: Workload, rows: list[Row], console: Console) -> list[dict[str, Any]]:
        if self.only:
            rows = [
                row
                for i, row in enumerate(rows)
                if not i or any(word in row.name for word in self.only)
            ]
        jobs, same = list[tuple[Row, Callable[[Row], None]]](), BaselineRow()
        # rows take turns, so that drift is nobody's; on a GPU, which holds the models of a few at
        # most, one after the other
        for together in [rows] if work.device.type == "cpu" else [[row] for row in rows]:
            jobs += [(row, partial(_build, work=work, same=same)) for row in together]
            jobs += [
                (row, partial(_take_turn, turn=turn + 1, same=same))
                for turn in range(self.repeats)
                for row in together
            ]
            jobs += [(row, _clear) for row in together]
        for row, do in track(jobs, f"{len(rows)} rows", console=console, transient=True):
            _attempt(row, do)
        roof = Roofline.probed(work)
        return list(_records(rows, roof))


def _stacked(device: torch.device) -> list[Row]:
    rows, flags, naive = list[Row](), dict(PLAIN), NAIVE
    for layer in LAYERS:
        aside = device.type in layer.aside
        row = Row(
            layer.name if not aside else f"({layer.name})",
            {**flags, **layer.flags},
            naive - layer.gives_up,
        )
        if layer.needs not in ("", device.type):
            row.status = f"needs {layer.needs}"
        elif layer.flags.get("compile_model") and (why := _cannot_compile(device)):
            row.status = why
        elif not aside:
            flags, naive = row.flags, row.naive
        rows.append(row)
    return rows


def _cannot_compile(device: torch.device) -> str:
    try:
        accel.check_compiler(Config.of(compile_model=True), device)
    except ConfigError as error:
        return str(error)
    return ""


def _alone(device: torch.device) -> list[Row]:
    """Each layer by itself, on top of the library's plain path."""
    rows = [Row("naive", dict(PLAIN), NAIVE), Row("plain", dict(PLAIN), frozenset())]
    for layer in LAYERS:
        if layer.flags:
            row = Row(layer.name, {**PLAIN, **layer.flags}, frozenset())
            row.status = "ok" if layer.needs in ("", device.type) else f"needs {layer.needs}"
            rows.append(row)
    return rows


def _attempt(row: Row, function: Any) -> None:
    """Out of memory is a status, and the run goes on."""
    if row.status != "ok":
        return
    try:
        function(row)
    except (torch.OutOfMemoryError, MemoryError):
        row.status = "out of memory"
    except ConfigError as error:
        row.status = str(error)
    if row.status != "ok":
        _clear(row)


def _clear(row: Row) -> None:
    row.machine = None
    gc.collect()  # compiled blocks refer to themselves
    torch.cuda.empty_cache()


def _build(row: Row, work: Workload, same: "BaselineRow") -> None:
    with probe.PeakMemory(work.device) as memory:
        start = time.perf_counter()
        row.machine = BenchStep(
            work.config.replace(**row.flags, learning_rate=FROZEN_LR), work, row.naive
        )
        row.machine.step(0)
        row.warm_up_s = time.perf_counter() - start
    resident = (
        torch.cuda.memory_allocated(work.device) / 2**20 - memory.before
        if work.device.type == "cuda"
        else 0.0
    )
    with probe.PeakMemory(
        work.device
    ) as peak:  # in a step that is not timed: looking gives freed memory back, which takes time
        row.machine.step(0)
    row.peak_mib = peak.mib + resident
    row.loss_difference, row.grad_difference = same.compare(row.machine)


def _take_turn(row: Row, turn: int, same: "BaselineRow") -> None:
    """One timed step of a row."""
    assert row.machine is not None
    graphs, before = accel.graphs_compiled(), probe.energy_joules(row.machine.device)
    row.steps.append(row.machine.step(turn))
    after = probe.energy_joules(row.machine.device)
    row.recompiles += accel.graphs_compiled() - graphs
    if before is not None and after is not None:
        row.joules.append(after - before)
    row.different += same.different(turn, row.machine.tokens())


class BaselineRow:
    """What the first row that ran gave; the others should give it too."""

    def __init__(self) -> None:
        self.tokens: dict[int, Tensor] = {}  # by turn
        self.first: tuple[RolloutBatch, float, list[Tensor]] | None = None

    def different(self, turn: int, ids: Tensor) -> int:
        """How many completions of a turn are others."""
        return int((ids != self.tokens.setdefault(turn, ids)).any(-1).sum())

    def compare(self, machine: BenchStep) -> tuple[float, float]:
        """How far off loss and gradient are, of one and the same rollout, as parts of the first
        row's.
        """
        batch = machine.batch if self.first is None else self.first[0]
        loss, gradient = machine.gradient(batch)
        gradient = [g.to("cpu", torch.float64) for g in gradient]
        if self.first is None:
            self.first = batch, loss, gradient
        _, first_loss, first_gradient = self.first
        norm = sum(float(g.square().sum()) for g in first_gradient) ** 0.5
        apart = (
            sum(
                float((a - b).square().sum()) for a, b in zip(gradient, first_gradient, strict=True)
            )
            ** 0.5
        )
        return abs(loss - first_loss) / (abs(first_loss) or 1), apart / (norm or 1)


@dataclass(frozen=True)
class Roofline:
    """The least time that a row's own work could take on this machine.

    seconds = rounds * (weight bytes + KV bytes) / bandwidth + FLOPs / matmul rate, both probed;
    FLOPs are 2 a parameter and token, three times that with a backward pass, and 4 * layers * width
    for each pair of tokens that attend; the head is counted for the tokens that it is needed for.
    """

    work: Workload
    bytes_per_s: float
    flops_per_s: dict[str, float]  # by precision

    @classmethod
    def probed(cls, work: Workload) -> "Roofline":
        rates = {}
        for name, dtype, tf32 in (
            ("float32", torch.float32, False),
            ("tf32", torch.float32, True),
            ("amp", torch.bfloat16, False),
        ):
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            rates[name] = probe.matmul_rate(work.device, dtype)
        torch.set_float32_matmul_precision("highest")
        return cls(work, probe.bandwidth(work.device), rates)

    def seconds(self, row: Row) -> tuple[float, float]:
        """Of a whole step, and of its FLOPs alone."""
        config, shape = self.work.config, self.work.shape
        low = row.flags["use_amp"]
        rate = self.flops_per_s["amp" if low else "tf32" if row.flags["use_tf32"] else "float32"]
        blocks = 12 * shape.layers * shape.width**2
        head = shape.vocab_size * shape.width
        seen = (
            self.work.prompt_len + row.middle("completion_len") / 2
        )  # tokens that a token attends to, about
        a_token = 2 * blocks + 4 * shape.layers * shape.width * seen
        answers = row.middle("completions") * row.middle("completion_len")
        run = row.middle("rollout/tokens")
        copies = config.sampling.group_size if "sampler" in row.naive else 1
        flops = run * a_token + 2 * head * (
            run - copies * config.sampling.prompts_per_step * (self.work.prompt_len - 1)
        )
        flops += (3 + bool(config.loss.kl_coef)) * (
            row.middle("tokens/run") * a_token + min(answers, row.middle("tokens/run")) * 2 * head
        )
        weights = (blocks + head) * (2 if low else 4)
        rows_at_once = answers / max(1.0, row.middle("rollout/rounds"))
        kv = (
            2
            * shape.layers
            * shape.width
            * (2 if low else 4)
            * (self.work.prompt_len + rows_at_once * seen)
        )
        traffic = row.middle("rollout/rounds") * (weights + kv)
        return traffic / self.bytes_per_s + flops / rate, flops / rate


def _records(rows: list[Row], roof: Roofline) -> Iterator[dict[str, Any]]:
    naive = rows[0].middle("seconds")
    for row in rows:
        done = bool(row.steps) and row.status == "ok"
        least, least_flops = roof.seconds(row) if done else (math.nan, math.nan)
        seconds = row.middle("seconds") if done else math.nan
        tokens = row.middle("completions") * row.middle("completion_len") if done else math.nan
        record = {
            "name": row.name,
            "flags": {
                name: value for name, value in row.flags.items() if value != Config().flat()[name]
            },
            "naive_parts": sorted(row.naive),
            "s_per_step": seconds,
            "samples": [step["seconds"] for step in row.steps],
            **{
                name: row.middle(name) if done else math.nan
                for name in ("rollout", "reward", "reference", "update")
            },
            "tokens_per_s": tokens / seconds,
            "speedup": naive / seconds,
            "peak_mib": row.peak_mib,
            "memory_measures": probe.PeakMemory(roof.work.device).measures,
            "loss_difference": row.loss_difference,
            "grad_difference": row.grad_difference,
            "roofline_multiple": seconds / least,
            "flops_multiple": seconds / least_flops,
            "rounds": row.middle("rollout/rounds"),
            "rounds_each": row.middle("rollout/rounds_each"),
            "tokens_rollout": row.middle("rollout/tokens"),
            "tokens_update": row.middle("tokens/run"),
            "different_completions": row.different,
            "completions": sum(int(step["completions"]) for step in row.steps),
            "joules": median(row.joules) if row.joules else None,
            "warm_up_s": row.warm_up_s,
            "recompiles": row.recompiles,
            "status": row.status,
        }
        yield json.loads(json.dumps(record).replace("NaN", "null").replace("Infinity", "null"))

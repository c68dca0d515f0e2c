"""What each speed layer gains: `python benchmark.py`, or `python benchmark.py steps`.

The first row is grpo.py's step, the second the library without its speed layers, and each further
row adds one layer. All rows sample the same tokens for the same prompts, and so as many. A learning
rate close to zero keeps their weights equal, although the whole step runs. On a CPU the rows are
interleaved, A B C A B C, so that a machine that slows down slows all of them.
"""

import copy
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import grpo
from minigrpo.config import Config
from minigrpo.rng import uniforms
from minigrpo.runtime.device import PhaseTimer, set_up_process
from minigrpo.types import Example, RolloutBatch

from .measure import Column, Median, device_name, gain, show
from .work import FROZEN_LR, Step, Work, WorkFlags, allocated, peak_of

GRPO_PY = "grpo.py"
# The flags that each row adds to those of the rows above it.
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
# Every speed layer is off, whatever the defaults and the config say.
PLAIN = {"packing": "repeated", "num_speculative_tokens": 0, **dict.fromkeys(SWITCHES, False)}
ONLY_ON_CUDA = ("TF32", "CUDA graphs of rounds", "torch.compile")
PHASES = ("rollout", "reward", "reference", "update")
COLUMNS: tuple[Column, ...] = (
    ("", "name", "{}"),
    ("s/step", "s/step", "{}"),
    *((phase, phase, "{:.3f}") for phase in PHASES),
    ("speedup", "speedup", "{}"),
    ("gain over the row above", "verdict", "{}"),
    ("peak MiB", "peak_mib", "{:,.0f}"),
    ("tokens: rollout", "rollout/tokens", "{:,.0f}"),
    ("update", "tokens/run", "{:,.0f}"),
    ("rounds", "rollout/rounds", "{:,.0f}"),
    ("gradient off by", "grad_difference", "{:.0e}"),
    ("tokens sampled", "completion_tokens", "{:,.0f}"),
)


class GrpoPyStep:
    """The first row: a training step made of grpo.py's functions, to be used like a Step."""

    def __init__(self, config: Config, work: Work) -> None:
        self.config = config
        self.work = work
        self.device = work.device
        self.model = copy.deepcopy(work.model)
        self.reference = copy.deepcopy(work.model) if config.loss.kl_coef else None
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, config.optimizer.learning_rate, weight_decay=0)
        self.timer = PhaseTimer(self.device)

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        set_up_process(self.config.speed, self.device)
        prompts, group_size = self.config.sampling.prompts_per_step, self.config.sampling.group_size
        self.timer.take()
        start = time.perf_counter()
        with self.timer.phase("data"):
            examples = [self.work.task.train(number * prompts + i) for i in range(prompts)]
            each = [example for example in examples for _ in range(group_size)]
        with self.timer.phase("rollout"):
            ids, mask = self._sample(examples, number)  # [B, T]
            texts = grpo.decode(self.work.tokenizer, ids, mask)
        with self.timer.phase("reward"):
            pairs = zip(each, texts, strict=True)
            scores = [grpo.reward(self.work.task, example, text) for example, text in pairs]
            rewards = torch.tensor(scores, device=self.device).view(prompts, group_size)
            A = grpo.advantages(rewards).flatten()  # [B]
        # a micro-batch has as many rows as the work says
        most = self.config.memory.micro_batch_size * group_size or len(ids)
        for rows in torch.arange(len(ids), device=self.device).split(most):
            ref_logp = None
            with self.timer.phase("reference"), torch.no_grad():
                if self.reference:
                    ref_logp = grpo.token_logprobs(self.reference, ids[rows], mask[rows])
            with self.timer.phase("update"):
                logp = grpo.token_logprobs(self.model, ids[rows], mask[rows])
                kl = ref_logp, self.config.loss.kl_coef
                loss = grpo.grpo_loss(logp, logp.detach(), A[rows], mask[rows], *kl)
                (loss * len(rows) / len(ids)).backward()
        with self.timer.phase("update"):
            grad_clip = self.config.optimizer.grad_clip
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        tokens = float(ids[:, 1:].numel())
        return {
            "seconds": time.perf_counter() - start,
            **self.timer.take(),
            "completion_tokens": float(mask.sum()),
            # forward passes after the one over the prompts
            "rollout/rounds": float(ids.shape[1] - 1 - mask.any(0).int().argmax()),
            "rollout/tokens": tokens,
            "tokens/run": tokens,
        }

    def _sample(self, examples: Sequence[Example], step: int) -> tuple[Tensor, Tensor]:
        """grpo.sample's `ids` and `mask`, `[B, T]`, by the uniform numbers of the library.

        So all rows produce the same completions. Row b's numbers begin where its prompt ends.
        """
        group_size, length = self.config.sampling.group_size, self.config.sampling.max_new_tokens
        index = np.array([example.index for example in examples])
        u = uniforms(self.config.run.seed, "sample", step, index, group_size, length)  # [P, G, S]
        own = torch.from_numpy(u).flatten(0, 1).to(self.device)  # [B, S]
        encode = self.work.tokenizer.encode
        prompts = [ids for x in examples for ids in [encode(x.prompt)] * group_size]
        starts = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        places = starts[:, None] + torch.arange(length, device=self.device)  # [B, S]
        by_column = own.new_zeros(len(own), int(places.max()) + 1).scatter(1, places, own)  # [B, T]
        eos = -1 if self.work.forced else self.work.tokenizer.eot
        return grpo.sample(self.model, prompts, eos, by_column, length)


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
        if not (work.forced or work.config.task.name == "chess-env"):
            del rows[0]  # grpo.py knows no chat template, and no rewards but a task's own
        # A GPU cannot hold the models of all rows, so there they run one after the other.
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


def rows_on(device_type: str) -> list[Row]:
    """The rows for a type of device, each with one layer more than the row above it."""
    rows = list[Row]()
    flags = PLAIN
    for name, added in LAYERS.items():
        if device_type == "cuda" or name not in ONLY_ON_CUDA:
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
    if isinstance(row.step, GrpoPyStep):  # tests/test_grpo.py compares its gradient
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

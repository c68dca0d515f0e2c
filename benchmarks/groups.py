"""What each packing runs in the update, by group size: `python benchmark.py groups`.

The more completions a group has, the more of them are equal or begin alike. Each batch is sampled
with the shipped model of a task, and every packing then computes the gradient of that same batch,
in turns. No group is skipped, whatever its rewards.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from rich.console import Console

from minigrpo import Config, Trainer
from minigrpo.model.packing import PACKINGS
from minigrpo.runtime.constraints import AtLeast

from . import probe
from .flags import BenchmarkFlags, Positive
from .intervals import FEWEST, median_of
from .report import Column, number, print_table

FULL, *_ = PACKINGS  # the packing that shares nothing
NEXT = {after: before for before, after in pairwise(PACKINGS)}  # what a packing is compared with
COLUMNS: tuple[Column, ...] = (
    ("task", "task", str),
    ("group size", "group_size", str),
    ("packing", "packing", str),
    ("tokens run", "tokens", number("{:,}")),
    ("of repeated", "share", number("{:.0%}")),
    ("seconds", "seconds", number("{:.3f}")),
    ("over the row above", "verdict", str),
)


@dataclass(frozen=True)
class Groups(BenchmarkFlags):
    """Tokens and seconds of an update by group size, for each packing."""

    tasks: tuple[str, ...] = ("chess-env", "countdown", "code")
    """Tasks with a shipped model."""
    group_sizes: Annotated[tuple[int, ...], AtLeast(2)] = (8, 16, 32, 64)
    """Completions per prompt."""
    prompts: Positive = 8
    """Prompts of a batch."""
    repeats: Positive = FEWEST + 2
    """Turns that are timed, after one that warms up."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        jobs = [(task, self.job(task, size)) for task in self.tasks for size in self.group_sizes]
        rows = list[dict[str, Any]]()
        for task, config in jobs:
            with console.status(f"{task}, {config.sampling.group_size} completions per prompt"):
                rows += [{"task": task, **row} for row in measure(config, self.repeats)]
        machine = probe.describe_machine(torch.device("cpu"))
        print_table(console, f"{self.prompts} prompts, {machine['device']}", rows, COLUMNS)
        made_by = probe.made_by(self.command())
        return {**machine, "benchmark": "groups", "made_by": made_by, "rows": rows}

    def job(self, task: str, group_size: int) -> Config:
        """A task's own settings, without what changes which completions are run."""
        settings = {"task": task, "prompts_per_step": self.prompts, "group_size": group_size}
        settings |= {"device": "cpu", "skip_zero_variance_groups": False, "micro_batch_size": 0}
        return Config.of(**settings).resolved(settings)


def measure(config: Config, repeats: int) -> list[dict[str, Any]]:
    """A row per packing, of the first batch of a run."""
    with TemporaryDirectory() as folder:
        trainer = Trainer(config.replace(out_dir=str(Path(folder, "run"))), quiet=True)
        learner, batch = trainer.learner, trainer.source.batch(0)
        trainer.scorer.close()
        trainer.run_dir.close()
    prepared, normalizer = learner.prepare(batch)
    seconds: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    for turn in range(repeats + 1):
        for packing, times in seconds.items():
            learner.config = config.replace(packing=packing)
            start = time.perf_counter()
            learner.gradient(prepared, normalizer)
            if turn:
                times.append(time.perf_counter() - start)
    tokens = {name: len(pack(batch.completions).tokens.ids) for name, pack in PACKINGS.items()}
    return [
        {
            "group_size": config.sampling.group_size,
            "packing": packing,
            "tokens": tokens[packing],
            "share": tokens[packing] / tokens[FULL],
            "seconds": median(seconds[packing]),
            "verdict": _verdict(seconds, packing),
        }
        for packing in PACKINGS
    ]


def _verdict(seconds: dict[str, list[float]], packing: str) -> str:
    if packing not in NEXT:
        return ""
    turns = zip(seconds[NEXT[packing]], seconds[packing], strict=True)
    return median_of([before / after for before, after in turns]).verdict()

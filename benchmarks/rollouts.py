"""What speculative decoding saves in the rollout, by task: `python benchmark.py rollouts`.

Each task's shipped model samples the same steps with and without it, in turns. Nothing is updated,
so both sample the same completions.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from minigrpo import Config, Trainer
from minigrpo.types import RolloutBatch

from . import probe
from .flags import BenchmarkFlags, Positive
from .intervals import FEWEST, median_of
from .report import Column, number, print_table

WAYS = {"without": False, "with": True}
COLUMNS: tuple[Column, ...] = (
    ("task", "task", str),
    ("speculative decoding", "way", str),
    ("tokens per completion", "length", number("{:.1f}")),
    ("rounds per completion", "rounds_each", number("{:.1f}")),
    ("rounds", "rounds", number("{:.0f}")),
    ("tokens run", "tokens", number("{:,.0f}")),
    ("seconds", "seconds", number("{:.3f}")),
    ("over the row above", "verdict", str),
)


@dataclass(frozen=True)
class Rollouts(BenchmarkFlags):
    """Rounds, tokens and seconds of sampling by task, with and without speculative decoding."""

    tasks: tuple[str, ...] = ("chess-env", "countdown", "math", "code")
    """Tasks with a shipped model."""
    turns: Positive = FEWEST + 2
    """Steps that each way samples, after one that warms up."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        jobs = {task: [self.job(task, on) for on in WAYS.values()] for task in self.tasks}
        rows = list[dict[str, Any]]()
        for task, configs in jobs.items():
            with console.status(task):
                rows += [{"task": task, **row} for row in measure(configs, self.turns)]
        machine = probe.describe_machine(torch.device("cpu"))
        print_table(console, f"One rollout, {machine['device']}", rows, COLUMNS)
        made_by = probe.made_by(self.command())
        return {**machine, "benchmark": "rollouts", "made_by": made_by, "rows": rows}

    def job(self, task: str, speculative: bool) -> Config:
        """A task's own settings, with or without speculative decoding."""
        settings = {"task": task, "device": "cpu", "speculative_decoding": speculative}
        return Config.of(**settings).resolved(settings)


def measure(configs: list[Config], turns: int) -> list[dict[str, Any]]:
    """A row per config. All of them sample the same steps, in turns."""
    with TemporaryDirectory() as folder:
        trainers = [
            Trainer(config.replace(out_dir=str(Path(folder, str(number)))), quiet=True)
            for number, config in enumerate(configs)
        ]
        batches: list[list[RolloutBatch]] = [[] for _ in trainers]
        seconds: list[list[float]] = [[] for _ in trainers]
        for step in range(turns + 1):
            for trainer, sampled, times in zip(trainers, batches, seconds, strict=True):
                batch = trainer.source.batch(step)
                spent = trainer.timer.take()["rollout"]
                if step:
                    times.append(spent)
                    sampled.append(batch)
        for trainer in trainers:
            trainer.scorer.close()
            trainer.run_dir.close()
    gains = [before / now for before, now in zip(*seconds, strict=True)]
    return [
        {
            "way": way,
            "length": fmean(
                float(b.completions.completion_mask.sum(-1).float().mean()) for b in sampled
            ),
            **{
                name: fmean(b.metrics[f"rollout/{name}"] for b in sampled)
                for name in ("rounds_each", "rounds", "tokens")
            },
            "seconds": median_of(times).middle,
            "verdict": median_of(gains).verdict() if WAYS[way] else "",
        }
        for way, sampled, times in zip(WAYS, batches, seconds, strict=True)
    ]

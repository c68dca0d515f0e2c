"""How far the trainer's log-probs are from the sampler's: `python benchmark.py gap`.

Both are computed with the same weights, so any difference is rounding. The sampler runs a few new
tokens of many texts at a time, and the trainer whole packed texts. A run logs the same measures, as
`sampling/logp_difference_mean`, `_max` and `sampling/off_by_10_percent`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from minigrpo import Config, Trainer
from minigrpo.learner import Learner
from minigrpo.model.packing import PACKINGS
from minigrpo.runtime.sampler_gap import LARGEST, MEAN, OFF, gap_sums
from minigrpo.types import Completions

from . import probe
from .flags import BenchmarkFlags, Positive
from .report import Column, number, print_table
from .workload import ConfigFiles, read_config

# name -> settings of the sampler and the trainer
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"use_amp": False, "low_precision_weights": False},
    "bfloat16": {"use_amp": True, "low_precision_weights": False},
    "bfloat16, weights too": {"use_amp": True, "low_precision_weights": True},
}
COLUMNS: tuple[Column, ...] = (
    ("precision", "precision", str),
    ("packing", "packing", str),
    ("tokens", "tokens", number("{:,}")),
    ("mean, nats", "mean", number("{:.1e}")),
    ("largest", "max", number("{:.1e}")),
    ("off by more than 10 %", "off", number("{:.4%}")),
)


@dataclass(frozen=True)
class Gap(BenchmarkFlags):
    """The gap between sampler and trainer, by precision and packing."""

    config: ConfigFiles = ()
    """The job: a TOML file or a preset; may be repeated. Default: the job of train.py."""
    steps: Positive = 4
    """Batches that are sampled in each precision; the weights stay those at the start."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        job = read_config(self.config).replace(use_tf32=False, amp_dtype="bfloat16")
        rows = list[dict[str, Any]]()
        for name, settings in PRECISIONS.items():
            with console.status(name):
                found = measure(job.replace(**settings), self.steps)
            rows += [{"precision": name, "packing": p, **row} for p, row in found.items()]
        machine = probe.describe_machine(torch.device("cpu"))
        title = f"{job.task.name}, {self.steps} batches, {machine['device']}"
        print_table(console, title, rows, COLUMNS)
        made_by = probe.made_by(self.command())
        return {**machine, "benchmark": "gap", "made_by": made_by, "rows": rows}


def measure(config: Config, steps: int) -> dict[str, dict[str, float]]:
    """By packing: the tokens of `steps` batches, and the measures of their gap."""
    sums = {packing: dict.fromkeys(("tokens", MEAN, OFF, LARGEST), 0.0) for packing in PACKINGS}
    for learner, completions in _batches(config, steps):
        sampled, mask = completions.sampler_logp, completions.completion_mask
        assert sampled is not None
        for packing, total in sums.items():
            found = gap_sums(_logp(learner, packing, completions), sampled, mask)
            total["tokens"] += int(mask.sum())
            for name in (MEAN, OFF):
                total[name] += float(found[name])
            total[LARGEST] = max(total[LARGEST], float(found[LARGEST]))
    return {
        packing: {
            "tokens": int(total["tokens"]),
            "mean": total[MEAN] / total["tokens"],
            "max": total[LARGEST],
            "off": total[OFF] / total["tokens"],
        }
        for packing, total in sums.items()
    }


def _batches(config: Config, steps: int) -> Iterator[tuple[Learner, Completions]]:
    """The completions of a run's first batches, all sampled with its first weights."""
    with TemporaryDirectory() as folder:
        trainer = Trainer(config.replace(out_dir=str(Path(folder, "run")), resume=""), quiet=True)
        for step in range(steps):
            completions = trainer.source.batch(step).completions
            yield trainer.learner, completions
        trainer.scorer.close()
        trainer.run_dir.close()


@torch.no_grad()
def _logp(learner: Learner, packing: str, completions: Completions) -> Tensor:
    """`[P, G, S]` log-probs by the trainer's forward, on the host."""
    size = learner.config.memory.micro_batch_size or len(completions)
    parts = torch.arange(len(completions)).split(size)
    packed = (PACKINGS[packing](completions.select(part)) for part in parts)
    return torch.cat([learner.forward(one.to(learner.device))[0].cpu() for one in packed])

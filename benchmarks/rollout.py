"""What proposals save while sampling: `python benchmark.py rollout`.

A run of a task with its own settings. In each step every row samples the same prompts with the same
weights, one row after another; then the step's update is made.

Seconds are CPU time of the process, in one thread unless --threads says otherwise: other programs
on the machine disturb it less than time on the clock.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from minigrpo import Config, Trainer
from minigrpo.runtime.rng import uniforms
from minigrpo.runtime.speculation import NONE
from minigrpo.sampling.params import SamplingParams
from minigrpo.sampling.sampler import Sampler
from minigrpo.types import Completions, Example

from . import probe
from .flags import BenchmarkFlags, Positive, PositiveOrZero
from .intervals import gain

MOST_DIFFERENT = 0.02  # share of the completions that rounding may change


@dataclass(frozen=True)
class Rollout(BenchmarkFlags):
    """Rounds, tokens and CPU seconds of sampling, by the sources of proposals."""

    task: str = "chess-env"
    """The task, with its own settings and the shipped model."""
    speculate: tuple[str, ...] = (NONE, "auto")
    """A row for each of these values of --speculate; gains are over the first."""
    steps: Positive = 12
    """Steps that are counted."""
    warmup: PositiveOrZero = 4
    """Steps before those."""
    num_speculative_tokens: PositiveOrZero = 15
    """Tokens proposed per completion and round, at most."""
    threads: Positive = 1
    """Threads of torch."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        torch.set_num_threads(self.threads)
        torch.set_num_interop_threads(1) if self.threads == 1 else None
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(folder)
            rows = {name: Row(name, self._sampler(trainer, name)) for name in self.speculate}
            for step in range(self.warmup + self.steps):
                self._step(trainer, list(rows.values()), step)
            trainer.scorer.close()
        found = [self._figures(row, rows[self.speculate[0]]) for row in rows.values()]
        console.print(self._table(found))
        made_by = probe.made_by(self.command())
        device = trainer.device
        return {**probe.describe_machine(device), "made_by": made_by, "rows": found}

    def _trainer(self, folder: str) -> Trainer:
        steps = self.warmup + self.steps
        config = Config.of(
            task=self.task,
            num_speculative_tokens=self.num_speculative_tokens,
            out_dir=f"{folder}/run",
        )
        config = config.replace(max_steps=max(steps, config.run.max_steps), device="cpu")
        return Trainer(config, quiet=True)

    def _sampler(self, trainer: Trainer, speculate: str) -> Sampler:
        config = trainer.config.replace(speculate=speculate)
        return Sampler(config, trainer.model, trainer.tokenizer, trainer.learner.autocast)

    def _step(self, trainer: Trainer, rows: "Sequence[Row]", step: int) -> None:
        config = trainer.config
        per_step = config.sampling.prompts_per_step
        examples = [trainer.task.train(step * per_step + i) for i in range(per_step)]
        # the first to go is another one in each step
        for row in [*rows[step % len(rows) :], *rows[: step % len(rows)]]:
            row.sample(examples, config, step)
        first = rows[0].last
        for row in rows[1:]:
            if (share := differing(row.last, first)) > MOST_DIFFERENT:
                raise AssertionError(f"{row.name}: {share:.1%} of the completions differ")
        trainer.learner.learn(trainer.source.batch(step), step)

    def _figures(self, row: "Row", over: "Row") -> dict[str, Any]:
        """Means over the steps that are counted."""
        steps = range(self.warmup, self.warmup + self.steps)
        work = Counter[str]()
        for step in steps:
            work.update(row.work[step])
        seconds = {step: row.seconds[step] for step in steps}
        faster = gain({step: over.seconds[step] for step in steps}, seconds)
        assert faster is not None
        sources = row.sampler.sources
        return {
            "name": row.name,
            "seconds": sum(seconds.values()) / len(steps),
            "gain": faster.verdict() if row is not over else "",
            "rounds": work["rounds"] / len(steps),
            "rounds_each": work["row_rounds"] / work["rows"],
            "kept_per_round": work["kept"] / work["row_rounds"],
            "tokens": work["tokens"] / len(steps),
            "tokens_per_kept": work["tokens"] / (work["kept"] + work["rows"]),
            "proposed": {x: work[f"proposed/{x}"] / work["row_rounds"] for x in sources},
            "accepted": {x: work[f"accepted/{x}"] / work["row_rounds"] for x in sources},
        }

    def _table(self, rows: Sequence[dict[str, Any]]) -> Table:
        table = Table(title=f"{self.task}, {self.threads} thread(s)", title_justify="left")
        for name in (
            "row",
            "CPU s/rollout",
            "gain",
            "rounds",
            "per completion",
            "tokens kept each",
        ):
            table.add_column(name, justify="right" if name != "row" else "left")
        for name in ("tokens run", "per token kept", "proposed per round (right) by source"):
            table.add_column(name, justify="left" if "source" in name else "right")
        for row in rows:
            by_source = [
                f"{name} {number:.2f} ({row['accepted'][name] / number:.0%})"
                for name, number in row["proposed"].items()
                if number
            ]
            table.add_row(
                row["name"],
                f"{row['seconds']:.3f}",
                row["gain"],
                f"{row['rounds']:.1f}",
                f"{row['rounds_each']:.1f}",
                f"{row['kept_per_round']:.2f}",
                f"{row['tokens']:,.0f}",
                f"{row['tokens_per_kept']:.2f}",
                ", ".join(by_source),
            )
        return table


@dataclass
class Row:
    """Samples with one value of --speculate."""

    name: str
    sampler: Sampler
    seconds: dict[int, float] = field(default_factory=dict)  # by step
    work: dict[int, Counter[str]] = field(default_factory=dict)
    last: Completions | None = None

    def sample(self, examples: Sequence[Example], config: Config, step: int) -> None:
        sampling, sampler = config.sampling, self.sampler
        numbers = np.array([example.index for example in examples])
        size = sampling.group_size, sampling.max_new_tokens
        u = uniforms(config.run.seed, "sample", step, numbers, *size)
        sampler.work.clear()
        began = time.process_time()
        parts = sampler.complete(
            examples,
            num_samples=sampling.group_size,
            u=u,
            params=SamplingParams.of(sampling),
            batch_size=config.memory.rollout_batch_size,
        )
        self.last = Completions.join(list(parts))
        self.seconds[step] = time.process_time() - began
        self.work[step] = sampler.work.copy()


def differing(a: Completions | None, b: Completions | None) -> float:
    """The share of completions that are not the same in both."""
    assert a is not None and b is not None
    texts = [
        [row[: mask.sum()].tolist() for row, mask in zip(*pair, strict=True)]
        for pair in (
            (x.completion_ids.flatten(0, 1), x.completion_mask.flatten(0, 1)) for x in (a, b)
        )
    ]
    return float(np.mean([x != y for x, y in zip(*texts, strict=True)]))

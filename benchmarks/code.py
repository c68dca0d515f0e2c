"""How many programs the code task runs per second: `python benchmark.py code`.

The programs are right one-line functions with five tests each, so that every one runs to its end.
Each is another text, because the scorer runs equal ones once. The workers are warm: they run
programs that are not timed first.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from minigrpo.rewards import RewardScorer
from minigrpo.tasks.one_liners import OneLiners
from minigrpo.types import Example

from .flags import BenchmarkFlags, Positive
from .probe import made_by

GROUP = 16


@dataclass(frozen=True)
class Code(BenchmarkFlags):
    """Executions per second of the code task, by the number of threads that ask."""

    size: Positive = 256
    """Programs per run."""
    workers: tuple[int, ...] = (1, 2, 4)
    """Numbers of threads: --num-reward-workers."""
    repeats: Positive = 5
    """Timed runs per number."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        task = OneLiners(0, timeout_s=10.0)
        batches = [_programs(task, self.size, number) for number in range(self.repeats + 1)]
        rows = [_measure(task, batches, workers) for workers in self.workers]
        table = Table("threads", "executions per second", "ms each", title=task.about)
        for row in rows:
            table.add_row(*(f"{row[name]:.0f}" for name in ("workers", "per_second")), row["ms"])
        console.print(table)
        return {
            "benchmark": "code",
            "made_by": made_by(self.command()),
            "held": task.about,
            "rows": rows,
        }


def _programs(task: OneLiners, size: int, batch: int) -> tuple[list[Example], list[list[str]]]:
    """Right programs, all of them different: `# number` is a comment."""
    examples, texts = [], []
    for number in range(-(-size // GROUP)):
        examples.append(task.train(number))
        answer = examples[-1].fields["code"]
        texts.append([f"{answer} # {batch} {i}" for i in range(GROUP)])
    return examples, texts


def _measure(
    task: OneLiners, batches: list[tuple[list[Example], list[list[str]]]], workers: int
) -> dict[str, Any]:
    scorer = RewardScorer(task, workers=workers)
    rates = []
    for number, (examples, texts) in enumerate(batches):
        start = time.perf_counter()
        table = scorer.score(examples, texts)
        seconds = time.perf_counter() - start
        if not (table.parts["passed"] == 1).all():
            raise AssertionError("a right program did not pass")
        if number:  # the first run starts the workers
            rates.append(table.total.size / seconds)
    scorer.close()
    rate = median(rates)
    return {"workers": workers, "per_second": rate, "ms": f"{1e3 / rate:.1f}"}

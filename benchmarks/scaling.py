"""How a step scales with the number of processes: `python benchmark.py scaling`.

It runs the same global batch on 1, 2, ... processes of one machine, started by torchrun as a user
would. Efficiency is the time with one process over n times the time with n. Without GPUs all
processes share the same cores, so the result shows the overhead of several processes, not the gain
from a second GPU.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minigrpo.config import Config

WARM_UP = 3  # steps that are not timed


@dataclass(frozen=True)
class Scaling:
    """Seconds per step of the default job on several processes."""

    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes; each must divide the 16 prompts per step."""
    threads: int = 1
    """Threads per process (OMP_NUM_THREADS), where there is no GPU."""
    steps: int = 15
    """Steps per run; the first 3 are not timed."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for number in self.processes:
            with console.status(f"{number} process{'es' if number > 1 else ''}"):
                rows.append({"processes": number, **self._measure(number)})
        one = rows[0]["s/step"] * rows[0]["processes"]
        for row in rows:
            row["efficiency"] = one / (row["processes"] * row["s/step"])
        cpu = f"{os.cpu_count()} CPU cores"
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
        console.print(self._table(rows, where))
        return {"benchmark": "scaling", "machine": where, "threads": self.threads, "rows": rows}

    def _table(self, rows: list[dict[str, Any]], where: str) -> Table:
        sampling = Config().sampling
        title = (
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} completions per step, "
            f"{where}, {self.threads} thread(s) per process"
        )
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
        return table

    def _measure(self, number: int) -> dict[str, float]:
        """Median seconds of a step and its phases. Raises RuntimeError if the run fails."""
        with TemporaryDirectory() as folder:
            run = Path(folder, "run")
            flags = ["--max-steps", self.steps, "--eval-every", 0, "--eval-size", 8]
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
            command = [*launch, "distributed_train.py", *flags, "--out-dir", run]
            done = subprocess.run(
                [sys.executable, *map(str, command)],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            lines = (run / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
        records = [json.loads(line) for line in lines]
        times = {"s/step": "step_time", "rollout": "time/rollout", "update": "time/update"}
        return {name: median(record[key] for record in records) for name, key in times.items()}

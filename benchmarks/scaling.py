"""How a step scales with processes: `python benchmark.py scaling`.

The same global batch on 1, 2, ... processes of one machine, started by torchrun as users start it.
Efficiency is the time of one process over n times that of n. On a machine without GPUs all
processes share the same cores, so this says what several processes cost there, not what a second
card would bring.
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

WARM_UP = 3  # steps that are not counted


@dataclass(frozen=True)
class Scaling:
    """Seconds a step of the default job on several processes."""

    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes; each must divide the 16 prompts of a step."""
    threads: int = 1
    """Threads of each process (OMP_NUM_THREADS), where there is no GPU."""
    steps: int = 15
    """Steps of each run; the first 3 are not counted."""
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
        where = (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"{os.cpu_count()} CPU cores"
        )
        table = Table(
            title=f"{Config().sampling.prompts_per_step} prompts x {Config().sampling.group_size} "
            f"completions a step, {where}, "
            f"{self.threads} thread(s) a process",
            title_justify="left",
        )
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(
                *(
                    f"{value:.3f}" if isinstance(value, float) else str(value)
                    for value in row.values()
                )
            )
        console.print(table)
        return {"benchmark": "scaling", "machine": where, "threads": self.threads, "rows": rows}

    def _measure(self, number: int) -> dict[str, float]:
        with TemporaryDirectory() as folder:
            flags = f"--max-steps {self.steps} --eval-every 0 --eval-size 8 --out-dir {folder}/run".split()
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={number}",
            ]
            env = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
            done = subprocess.run(
                [*launch, "distributed_train.py", *flags], capture_output=True, text=True, env=env
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            records = [
                json.loads(line)
                for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
            ][WARM_UP:]
        times = {"s/step": "step_time", "rollout": "time/rollout", "update": "time/update"}
        return {name: median(record[key] for record in records) for name, key in times.items()}

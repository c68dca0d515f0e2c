"""How a step scales with the number of processes: `python benchmark.py scaling`.

It runs the same global batch on 1, 2, ... processes of one machine, started by torchrun: with DDP,
and with --fsdp. Without GPUs they share the cores: the result then shows their overhead, not the
gain from a second GPU.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from minigrpo.run.logging import LoggedNumbers, read_run

from .measure import Column, Median, Outputs, device_name, show

COLUMNS: tuple[Column, ...] = (
    ("processes", "processes", "{}"),
    ("weights", "weights", "{}"),
    ("s/step", "s/step", "{}"),
    ("rollout", "rollout", "{:.3f}"),
    ("update", "update", "{:.3f}"),
    ("efficiency", "efficiency", "{:.2f}"),
)


@dataclass(frozen=True)
class Scaling(Outputs):
    """Seconds per step on several processes, of the default job."""

    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes."""
    steps: int = 15
    """Steps per run; the first 3 are not timed."""

    def run(self, console: Console) -> dict[str, Any]:
        rows = list[dict[str, Any]]()
        ways = [
            (n, way)
            for n in self.processes
            for way in ("whole", "sharded")
            if n > 1 or way == "whole"
        ]
        for n, way in track(ways, "processes", console=console, transient=True):
            steps = self._steps(n, way == "sharded")
            seconds = Median.of([step["step_time"] for step in steps])
            row: dict[str, Any] = {"processes": n, "weights": way}
            row["s/step"] = seconds.text("{:.3f}")
            row["seconds"] = seconds.middle
            row["rollout"] = median(step["time/rollout"] for step in steps)
            row["update"] = median(step["time/update"] for step in steps)
            rows.append(row)
            alone = rows[0]["seconds"] * rows[0]["processes"]
            row["efficiency"] = alone / (n * seconds.middle)
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        table = show(console, f"{device}; one thread per process", rows, COLUMNS)
        return {"device": device, "rows": rows, "tables": [table]}

    def _steps(self, number_of_processes: int, fsdp: bool) -> Sequence[LoggedNumbers]:
        with TemporaryDirectory() as folder:
            run = Path(folder, "run")
            words = f"-m torch.distributed.run --standalone --nproc_per_node={number_of_processes}"
            words += f" -m minigrpo train --max-steps {self.steps} --eval-every 0 --eval-size 8"
            words += " --fsdp" * fsdp
            command = [sys.executable, *words.split(), "--save-every=1000000", f"--out-dir={run}"]
            # finds the package of a checkout from any folder
            here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run(command, env=os.environ | here, stdout=subprocess.DEVNULL, check=True)
            return read_run(run).metrics[3:]  # the first ones warm up

"""How a step scales with the number of processes: `python benchmark.py scaling`.

It runs the same global batch on 1, 2, ... processes of one machine, started by torchrun as a user
would. Without GPUs all processes share the same cores: the result then shows the overhead of
several processes, not the gain from a second GPU.
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
from rich.progress import track

from .measure import Column, Median, Outputs, device_name, number, show

COLUMNS: tuple[Column, ...] = (
    ("processes", "processes", str),
    ("s/step", "s/step", str),
    ("rollout", "rollout", number("{:.3f}")),
    ("update", "update", number("{:.3f}")),
    ("efficiency", "efficiency", number("{:.2f}")),
    ("s/step expected of as many cards", "expected", str),
)


@dataclass(frozen=True)
class Scaling(Outputs):
    """Seconds per step of the default job on several processes."""

    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes; each must divide the prompts per step."""
    steps: int = 15
    """Steps per run; the first 3 are not timed."""

    def run(self, console: Console) -> dict[str, Any]:
        rows = list[dict[str, Any]]()
        for n in track(self.processes, "processes", console=console, transient=True):
            steps = self._steps(n)
            seconds = Median.of([step["step_time"] for step in steps])
            row: dict[str, Any] = {"processes": n, "s/step": seconds.text("{:.3f}")}
            row["seconds"] = seconds.middle
            for name in ("rollout", "update"):
                row[name] = median(step.get(f"time/{name}", 0.0) for step in steps)
            first = rows[0] if rows else row
            alone = first["seconds"] * first["processes"]
            row["efficiency"] = alone / (n * seconds.middle)
            row["expected"] = expected(first, n)
            rows.append(row)
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        table = show(console, f"{device}; one thread per process", rows, COLUMNS)
        return {"device": device, "rows": rows, "tables": [table]}

    def _steps(self, number_of_processes: int) -> list[dict[str, Any]]:
        with TemporaryDirectory() as folder:
            run = Path(folder, "run")
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            words += [f"--nproc_per_node={number_of_processes}", "-m", "minigrpo", "train"]
            words += ["--max-steps", str(self.steps), "--stop-after", "0", "--eval-every", "0"]
            words += ["--eval-size", "8", "--save-every", "1000000", "--out-dir", str(run)]
            # the package of a checkout, too, is found from whatever folder this starts in
            here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run(words, env=os.environ | here, stdout=subprocess.DEVNULL, check=True)
            lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[3:]]  # the first ones warm up


def expected(alone: dict[str, Any], cards: int) -> str:
    """Seconds per step, from those of one process with a core or a card of its own.

    Everything is shared out; or all but the rollout, because a round of decoding reads all weights,
    however few prompts a card has. The exchange of gradients runs beside the backward pass.
    """
    rollout, seconds = alone["rollout"], alone["seconds"]
    slowest = rollout + (seconds - rollout) / cards
    return f"{seconds / cards:.2f}-{slowest:.2f}" if cards > 1 else ""

"""How a step scales with the number of processes: `python benchmark.py scaling`.

It runs the same global batch on 1, 2, ... processes of one machine, started by torchrun as a user
would. Efficiency is the time of the first number of processes n0, times n0 / n, over the time with
n. Without GPUs all processes share the same cores, so the result shows the overhead of several
processes, not the gain from a second GPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

import minigrpo
from minigrpo.config import Config
from minigrpo.runtime.combinations import check_shares
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.flags import ConfigError

from .flags import BenchmarkFlags, Positive
from .intervals import median_of
from .probe import made_by
from .workload import ConfigFiles, read_config

WARM_UP = 3  # steps that are not timed
POLL_S = 0.2  # between two looks at how far a run is


@dataclass(frozen=True)
class Scaling(BenchmarkFlags):
    """Seconds per step of a job on several processes."""

    processes: Annotated[tuple[int, ...], AtLeast(1)] = (1, 2)
    """Numbers of processes; each must divide the prompts per step."""
    config: ConfigFiles = ()
    """The job: a TOML file or a preset; may be repeated. Default: the job of train.py."""
    threads: Positive = 1
    """Threads per process (OMP_NUM_THREADS), where there is no GPU."""
    steps: Annotated[int, AtLeast(WARM_UP + 1)] = 15
    """Steps per run; the first 3 are not timed."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        job = read_config(self.config)
        gpus = torch.cuda.device_count() if job.speed.device != "cpu" else 0
        for number in self.processes:
            check_shares(job, number)
            if gpus and number > gpus:
                raise ConfigError(f"--processes {number}: this machine has {gpus} GPUs")
        rows = list[dict[str, Any]]()
        with Progress(console=console, transient=True) as progress:
            for number in self.processes:
                name = f"{number} process{'es' if number > 1 else ''}"
                bar = progress.add_task(name, total=self.steps)
                steps = self._steps(number, partial(_advance, progress, bar))
                rows.append({"processes": number, **_figures(steps)})
        one = rows[0]["s/step"] * rows[0]["processes"]
        for row in rows:
            row["efficiency"] = one / (row["processes"] * row["s/step"])
        where = torch.cuda.get_device_name() if gpus else f"{os.cpu_count()} CPU cores"
        console.print(self._table(rows, job, where))
        return {
            "benchmark": "scaling",
            "made_by": made_by(self.command()),
            "machine": where,
            "threads": self.threads,
            "rows": rows,
        }

    def _table(self, rows: list[dict[str, Any]], job: Config, where: str) -> Table:
        group = "true answers" if job.supervised else f"{job.sampling.group_size} completions"
        title = (
            f"{job.sampling.prompts_per_step} prompts x {group} per step, {where}, "
            f"{self.threads} thread(s) per process"
        )
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*map(_shown, row.values()))
        return table

    def _steps(self, number: int, show: Callable[[int], None]) -> list[dict[str, Any]]:
        """The timed steps of a run. Raises ConfigError with its last line if the run fails."""
        with TemporaryDirectory() as folder:
            run, errors = Path(folder, "run"), Path(folder, "stderr")
            metrics = run / "metrics.jsonl"
            with errors.open("wb") as stderr:
                process = subprocess.Popen(
                    self._command(number, run),
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=self._environment(),
                )
                try:
                    while _is_running(process):
                        show(len(metrics.read_bytes().splitlines()) if metrics.exists() else 0)
                finally:  # torchrun ends its processes when it is told to end
                    process.terminate()
                    process.wait()
            if process.returncode:
                raise ConfigError(f"--processes {number}: {_reason(errors)}")
            lines = metrics.read_text().splitlines()
        return [json.loads(line) for line in lines[WARM_UP:]]

    def _command(self, number: int, run: Path) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
        files = [word for file in self.config for word in ("--config", file)]
        length = ["--max-steps", self.steps, "--stop-after", 0]
        less = ["--eval-every", 0, "--eval-size", 8, "--save-every", 10**9, "--out-dir", run]
        train = ["-m", "minigrpo.tools.train", *files, *length, *less]
        return [sys.executable, *map(str, launch), *map(str, train)]

    def _environment(self) -> dict[str, str]:
        """Python finds the package, also that of a checkout, from whatever folder it starts in."""
        package = str(Path(minigrpo.__file__).parents[1])
        paths = filter(None, (package, os.environ.get("PYTHONPATH")))
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


def _advance(progress: Progress, bar: TaskID, done: int) -> None:
    progress.update(bar, completed=done)


def _is_running(process: "subprocess.Popen[bytes]") -> bool:
    """Wait a moment for a process; whether it still runs after that."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _reason(errors: Path) -> str:
    """The run's own one-line error, or else its last line."""
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (ours or list(filter(None, lines)) or ["the run failed without a message"])[-1]


def _figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds of a step, with the interval, and of its phases."""
    seconds = median_of([step["step_time"] for step in steps])
    phases = {
        name: median(step.get(f"time/{name}", 0.0) for step in steps)
        for name in ("rollout", "update")
    }
    return {"s/step": seconds.middle, "95 % interval": seconds.ends, **phases}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(f"{end:.2f}" for end in value)
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

"""What `minigrpo plan` predicts beside what a run measures: `python benchmark.py plan`.

Each job of plan_jobs.py is predicted and then run for a few steps, both in processes of their own.
Peak memory is what the plan predicts: CUDA memory allocated, or on a CPU the growth of the
process's resident memory since before the model was made.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from minigrpo import Config, Trainer
from minigrpo.runtime.accel import pick_device
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.machine import PeakMemory
from minigrpo.runtime.planner import Planner

from . import probe
from .plan_jobs import JOBS, Job, Settings

PHASES = ("rollout", "reward", "reference", "update")
ALLOWED = 0.3  # a prediction may be off by this share of what is measured
SMALLEST_SHARE = 0.05  # of the step; a phase that takes less is not shown
# The first steps of a process are slower than the others, also after the very first. So the median
# of short steps is taken over this many seconds or steps.
LEAST_SECONDS, MOST_STEPS = 5.0, 40
# runs first, so that the memory of what torch loads when it is first used is not the job's
TINY: Settings = {
    "init_from": "scratch",
    "layers": 1,
    "width": 16,
    "heads": 1,
    "prompts_per_step": 1,
    "group_size": 2,
    "max_new_tokens": 4,
    "kl_coef": 0.1,
}


@dataclass(frozen=True)
class Plan:
    """Predicted beside measured seconds and peak memory of a step, for several jobs."""

    only: tuple[str, ...] = ()
    """Jobs to run, such as default, gpt2, lean, qwen-120m-lora, qwen2.5-0.5b; none given: all."""
    steps: int = 6
    """Fewest steps per job; the first one warms up, and the others' median counts."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        if self.steps < 2:
            raise ConfigError(f"--steps must be at least 2, because one warms up, got {self.steps}")
        if unknown := [name for name in self.only if name not in JOBS]:
            raise ConfigError(f"--only must be some of {', '.join(JOBS)}, got {unknown[0]}")
        device = pick_device(self.device)
        rows = [self._row(name, JOBS[name], str(device), console) for name in self.only or JOBS]
        machine = probe.describe_machine(device)
        result = {**machine, "memory_measures": PeakMemory(device).measures, "rows": rows}
        show(result, console)
        return result

    def _row(self, name: str, job: Job, device: str, console: Console) -> dict[str, Any]:
        steps = min(self.steps, job.steps or self.steps)
        with tempfile.TemporaryDirectory() as folder:
            with console.status(f"{name}: predicting"):
                settings = {**_alone(job.prepare, Path(folder)), "device": device}
                predicted = _alone(predict, settings)
            with console.status(f"{name}: {steps} steps"):
                measured = _alone(measure, settings, steps)
        return {"job": name, "predicted": predicted, "measured": measured}


def _alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The function's result, from a process of its own, whose memory nothing else has used."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def predict(settings: Settings) -> dict[str, Any]:
    """What the plan says of a job: of its estimates, the most likely one."""
    start = time.perf_counter()
    found = Planner(Config.of(**settings)).estimates()
    name, estimate = list(found.items())[-1]
    return {
        "assumes": name,
        "seconds": dict(estimate.seconds),
        "step": estimate.step_seconds,
        "peak_mib": estimate.peak_mib,
        "took": time.perf_counter() - start,
    }


def measure(settings: Settings, steps: int) -> dict[str, Any]:
    """Medians of a run's first steps without the first: seconds by phase, and peak memory."""
    _steps({**TINY, "device": settings["device"]}, 2)
    with PeakMemory(pick_device(settings["device"])) as before:
        timed, peaks = _steps(settings, steps, LEAST_SECONDS)
    middle = {name: median(step[name] for step in timed[1:]) for name in timed[0]}
    step = middle.pop("step")
    return {"seconds": middle, "step": step, "peak_mib": median(peaks) - before.before}


def _steps(
    settings: Settings, steps: int, least: float = 0.0
) -> tuple[list[dict[str, float]], list[float]]:
    """Seconds of each step of a run, by phase; and MiB in use at the peak of half as many more.

    At least so many steps, and `least` seconds. Before a step whose peak is measured, the memory
    that the last one has freed is given back, which would cost time in a step that is timed.
    """
    timed, peaks = list[dict[str, float]](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        config = Config.of(**settings, out_dir=str(Path(folder) / "run"))
        trainer = Trainer(config, quiet=True)
        while len(timed) < steps or (
            len(timed) < MOST_STEPS and sum(step["step"] for step in timed) < least
        ):
            start = time.perf_counter()
            _step(trainer, len(timed))
            took, seconds = time.perf_counter() - start, trainer.timer.take()
            phases = {name: seconds[name] for name in PHASES if name in seconds}
            timed.append({**phases, "step": took})
        for number in range(len(timed), len(timed) + max(1, len(timed) // 2)):
            with PeakMemory(trainer.device) as peak:
                _step(trainer, number)
            peaks.append(peak.before + peak.mib)
        trainer.scorer.close()
        trainer.run_dir.close()
    return timed, peaks


def _step(trainer: Trainer, number: int) -> None:
    batch = trainer.source.batch(number)
    with trainer.timer.phase("update"):
        trainer.learner.learn(batch, number)


def comparisons(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Name, predicted, measured: of each phase that matters, the whole step, and the peak."""
    predicted, measured = row["predicted"], row["measured"]
    least = SMALLEST_SHARE * measured["step"]
    phases = [
        (f"seconds: {name}", seconds, measured["seconds"].get(name, 0.0))
        for name, seconds in predicted["seconds"].items()
        if max(seconds, measured["seconds"].get(name, 0.0)) >= least
    ]
    step = ("seconds: step", predicted["step"], measured["step"])
    return [*phases, step, ("MiB: peak", predicted["peak_mib"], measured["peak_mib"])]


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a table, and whether step time and peak memory are as close as they should be."""
    table = Table(title=f"{result['device']}; memory: {result['memory_measures']}")
    for name in ("job", "assumes", "", "predicted", "measured", "ratio"):
        table.add_column(name, justify="left" if name in ("job", "assumes", "") else "right")
    far = []
    for row in result["rows"]:
        job, assumes = row["job"], row["predicted"]["assumes"]
        for name, predicted, measured in comparisons(row):
            ratio = predicted / measured if measured else float("nan")
            table.add_row(
                job, assumes, name, f"{predicted:,.3g}", f"{measured:,.3g}", f"{ratio:.2f}"
            )
            if name in ("seconds: step", "MiB: peak") and not abs(ratio - 1) <= ALLOWED:
                far.append(f"{row['job']}, {name.removeprefix('seconds: ')}: {ratio:.2f}")
            job = assumes = ""
    console.print(table)
    within = f"within {ALLOWED:.0%} of what was measured"
    verdict = f"not {within}: {'; '.join(far)}" if far else f"step time and peak are {within}"
    console.print(verdict, highlight=False)

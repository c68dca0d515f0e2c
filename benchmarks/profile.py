"""Where the time of a step goes: `python benchmark.py profile`.

A run of each task is traced by torch.profiler for a few steps. Every operation's own time is put
down to the phase that it ran in and to the kind of its name. What is left of a phase is Python and
the launching of operations. Tracing makes a step slower, so only the shares count.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from minigrpo import Config, Trainer

from . import probe
from .flags import BenchmarkFlags, Positive
from .report import Column, number, print_table

PHASES = ("rollout", "update")
PRODUCTS, ATTENTION, MOVES = "matrix products", "attention", "gathers and copies"
OTHERS, PYTHON = "other operations", "Python, launches"
# the beginnings of torch's names, without "aten::" and underscores in front
KINDS = {
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm", "linear", "onednn", "mkldnn"),
    ATTENTION: ("scaled_dot_product",),
    MOVES: ("index", "copy", "cat", "scatter", "gather", "fill", "zero", "pad", "repeat"),
}
WARM_UP = 3  # steps before the trace
SHARES: tuple[Column, ...] = tuple(
    (kind, kind, number("{:.0%}")) for kind in (*KINDS, OTHERS, PYTHON)
)
COLUMNS: tuple[Column, ...] = (
    ("task", "task", str),
    ("phase", "phase", str),
    ("of the step", "share", number("{:.0%}")),
    *SHARES,
)


@dataclass(frozen=True)
class Profile(BenchmarkFlags):
    """Shares of a step's time by phase and by kind of operation, on a CPU."""

    tasks: tuple[str, ...] = ("chess-env", "countdown", "math", "code")
    """Tasks with a shipped model."""
    steps: Positive = 4
    """Steps that are traced, after some that warm up."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        settings = [{"task": task, "device": "cpu"} for task in self.tasks]
        jobs = [Config.of(**one).resolved(one) for one in settings]
        rows = list[dict[str, Any]]()
        for task, config in zip(self.tasks, jobs, strict=True):
            with console.status(task):
                rows += [{"task": task, **row} for row in measure(config, self.steps)]
        machine = probe.describe_machine(torch.device("cpu"))
        print_table(console, f"Shares of a step, {machine['device']}", rows, COLUMNS)
        made_by = probe.made_by(self.command())
        return {**machine, "benchmark": "profile", "made_by": made_by, "rows": rows}


def measure(config: Config, steps: int) -> list[dict[str, Any]]:
    """A row per phase."""
    with TemporaryDirectory() as folder:
        changed = config.replace(out_dir=str(Path(folder, "run")), max_steps=WARM_UP + steps)
        trainer = Trainer(changed, quiet=True)
        trainer.log = trainer.run_dir.open_log(0)
        trainer.screen.start(WARM_UP + steps, 0)
        for _ in range(WARM_UP):
            trainer.one_step()
        with profile(activities=[ProfilerActivity.CPU]) as traced:
            for _ in range(steps):
                trainer.one_step()
        trainer.screen.stop()
        trainer.log.close()
        trainer.scorer.close()
        trainer.run_dir.close()
    seconds = {phase: defaultdict[str, float](float) for phase in PHASES}
    whole = 0.0
    for event in traced.events():
        at: Any = event
        while at is not None and at.name not in PHASES:
            at = at.cpu_parent
        if at is not None:
            kind = PYTHON if at is event else kind_of(event.name)
            seconds[at.name][kind] += event.self_cpu_time_total
        if event.cpu_parent is None and event.name in PHASES:
            whole += event.cpu_time_total
    return [
        {
            "phase": phase,
            "share": sum(spent.values()) / whole,
            **{kind: spent[kind] / sum(spent.values()) for _, kind, _ in SHARES},
        }
        for phase, spent in seconds.items()
    ]


def kind_of(name: str) -> str:
    """The kind of an operation, by its name in a trace."""
    plain = name.removeprefix("aten::").lstrip("_")
    return next((kind for kind, starts in KINDS.items() if plain.startswith(starts)), OTHERS)

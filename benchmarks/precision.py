"""Whether training in low precision gives the curves of float32: `python benchmark.py precision`.

Two jobs are trained in each precision on several seeds: the supervised warm start from random
weights, for the curve of the loss, and the default GRPO job, for the reward and for exact-match.
The policy loss of GRPO is not compared: with one update per rollout the ratio is 1 and the
advantages of a group add up to 0, so its value is near 0 however well the model does.

Each run is a training run of its own in a folder of --out-dir. A finished run is not repeated, and
one that was interrupted continues from its last checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from minigrpo.config import Config
from minigrpo.runtime import accel
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.tools.curves import FORMATS

from . import probe
from .flags import BenchmarkFlags, Positive
from .precision_curves import COLUMNS, LIMIT, Curves, draw
from .report import markdown, print_table
from .training_runs import Run, train

EVALUATIONS = 20  # of a GRPO run, besides those before and after training
WINDOW_SHARE = 10  # curves with a point per step are averaged over a tenth of the steps
WINDOW_EVALUATIONS = 3
SPREAD = (
    "Differences are between the means over the seeds, relative to float32. Spread: the standard "
    "deviation between the seeds in float32."
)
# measure -> (file in a run's folder, label)
SUPERVISED = {"loss": ("metrics.jsonl", "loss per token, nats")}
POLICY = {
    "reward": ("metrics.jsonl", "reward"),
    "exact_sampled": ("eval.jsonl", "held-out exact-match, sampled"),
    "exact": ("eval.jsonl", "held-out exact-match, greedy"),
}


@dataclass(frozen=True)
class Precision(BenchmarkFlags):
    """Training curves in float32, bfloat16 and, on CUDA, float16: how far they are apart."""

    steps: Positive = 1000
    """Steps per run; the learning rate decays over them."""
    seeds: Positive = 3
    """Runs per job and precision, with the seeds 0, 1, ..."""
    config: Path | None = None
    """A TOML file or preset: compare on its job, instead of the warm start and the default job."""
    jobs: Positive = 1
    """Runs side by side."""
    threads: Positive = 1
    """Threads per run (OMP_NUM_THREADS)."""
    eval_size: Positive = 512
    """Held-out examples per evaluation."""
    out_dir: Path = Path("runs/precision")
    """Folder of the runs, and of precision.json, .md and .png. Finished runs in it are reused."""
    figure: Path | None = None
    """Write the figure here too, as PNG, SVG or PDF."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        if self.figure and self.figure.suffix not in FORMATS:
            raise ConfigError(f"--figure must end with {', '.join(FORMATS)}, got {self.figure}")
        runs = self._runs()
        figure_dir = self.figure.parent if self.figure else self.out_dir
        for name, folder in (("--out-dir", self.out_dir), ("--figure", figure_dir)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{name} {folder}: cannot be made ({error.strerror})") from None
        torch.set_num_threads(self.threads)  # so that the machine's description says so
        train(runs, self.jobs, self.threads, Screen(quiet=console.quiet))
        failures = {run.name: run.failed for run in runs if run.failed}
        curves = collect([run for run in runs if not run.failed], self.steps)
        if not curves:
            lines = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise ConfigError(f"nothing to compare, because runs failed: {lines}")
        rows = [record for one in curves for record in one.records()]
        device = accel.pick_device(runs[0].config.speed.device)
        machine = probe.device_name(device)
        result = {
            **probe.describe_machine(device),
            "benchmark": "precision",
            "steps": self.steps,
            "seeds": self.seeds,
            "threads": self.threads,
            "config": str(self.config) if self.config else None,
            "rows": rows,
            "failed": failures,
            "verdict": verdicts(rows, failures),
            "curves": [one.to_dict() for one in curves],
        }
        title = f"{machine}: {self.steps} steps, seeds 0 to {self.seeds - 1}"
        print_table(console, title, rows, COLUMNS)
        for line in [SPREAD, *result["verdict"]]:
            console.print(line, highlight=False)
        self._write(result, markdown(title, rows, COLUMNS), console)
        for out in filter(None, (self.out_dir / "precision.png", self.figure)):
            draw(curves, out, title, console)
        return result

    def _runs(self) -> list[Run]:
        if self.config:
            config = Config.from_toml(self.config)
            jobs = {config.loss.name: config}
        else:
            jobs = {"nll": Config.from_toml("warm-start"), "grpo": Config()}
        return [  # in an order that completes a seed in every precision before the next seed
            Run(job, precision, seed, config, self.out_dir / f"{job}-{precision}-{seed}")
            for job, base in jobs.items()
            for seed in range(self.seeds)
            for precision, config in self._in_precisions(base.replace(seed=seed)).items()
        ]

    def _in_precisions(self, base: Config) -> dict[str, Config]:
        every = 0 if base.supervised else max(1, self.steps // EVALUATIONS)
        base = base.replace(
            max_steps=self.steps,
            stop_after=0,
            out_dir="",
            resume="",
            eval_every=every,
            eval_size=self.eval_size,
            eval_size_during=self.eval_size,
        )
        amp = {"use_amp": True, "use_tf32": False}
        float32 = base.replace(use_amp=False, use_tf32=False, low_precision_weights=False)
        found = {"float32": float32, "bfloat16": base.replace(**amp, amp_dtype="bfloat16")}
        if accel.pick_device(base.speed.device).type == "cuda":
            found["float16"] = base.replace(**amp, amp_dtype="float16")
        return found

    def _write(self, result: dict[str, Any], table: str, console: Console) -> None:
        text = "\n".join([f"# {result['device']}\n", table, SPREAD, "", *result["verdict"], ""])
        (self.out_dir / "precision.md").write_text(text)
        (self.out_dir / "precision.json").write_text(json.dumps(result) + "\n")
        console.print(f"wrote {self.out_dir}/precision.md, .json, .png", highlight=False)


def collect(runs: Sequence[Run], steps: int) -> list[Curves]:
    """The curves of the seeds that finished in every precision of their job."""
    found = []
    for job in dict.fromkeys(run.job for run in runs):
        by_key = {(run.precision, run.seed): run for run in runs if run.job == job}
        precisions = list(dict.fromkeys(precision for precision, _ in by_key))
        seeds = [
            seed
            for seed in sorted({seed for _, seed in by_key})
            if all((precision, seed) in by_key for precision in precisions)
        ]
        if not seeds or "float32" not in precisions:
            continue
        config = by_key["float32", seeds[0]].config
        for measure, (file, label) in (SUPERVISED if config.supervised else POLICY).items():
            read = {
                p: [by_key[p, seed].values(file, measure) for seed in seeds] for p in precisions
            }
            per_step = file == "metrics.jsonl"
            found.append(
                Curves(
                    job=job,
                    measure=measure,
                    label=label,
                    steps=np.array(read["float32"][0][0]),
                    window=max(1, steps // WINDOW_SHARE) if per_step else WINDOW_EVALUATIONS,
                    unit="steps" if per_step else "evaluations",
                    by_precision={
                        p: np.array([values for _, values in curves]) for p, curves in read.items()
                    },
                )
            )
    return found


def verdicts(rows: Sequence[dict[str, Any]], failures: dict[str, str]) -> list[str]:
    """A line per precision, one per curve of it, and one per failed run."""
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        mine = [row for row in rows if row["precision"] == precision]
        passed = sum(row["passed"] for row in mine)
        limit = f"{100 * LIMIT:.0f} %"
        lines.append(f"{precision}: {passed} of {len(mine)} curves differ by less than {limit}")
        lines += [f"- {row['name']}: {row['verdict']}" for row in mine]
    return lines + [f"{name} failed: {reason}" for name, reason in failures.items()]

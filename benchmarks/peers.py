"""TRL's GRPOTrainer on the same job: `python benchmark.py peers`.

Each row is a process of its own, which does one training step when it is told to. The rows take
turns, A B C D A B C D, so a machine that slows down slows all of them. After the last step all
models are compared on the same held-out prompts, which shows whether the rows did the same work.
"""

import json
import math
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from rich.console import Console

from minigrpo.config import Config
from minigrpo.runtime import accel
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen

from . import probe
from .flags import BenchmarkFlags
from .peer_rows import COLUMNS, REWARDS, WARM_UP, Row, Settings, record, take_turns
from .report import folder_for, markdown, print_table
from .workload import Workload, WorkloadFlags

NEEDED = ("transformers", "trl", "accelerate", "datasets")  # the extra `peer`
SIZES = ("prompts_per_step", "group_size", "max_new_tokens")
DEFAULT_BATCH = 8  # TRL's per_device_train_batch_size, if the user sets none
NOTES = """\
The same in all rows: initial weights, prompts and their order, rewards (this library's scorer),
group size, lengths, temperature, the loss (grpo: the mean over completions of the mean over
tokens; KL by k3), AdamW, learning rate and schedule, clipping to a norm of 1, one optimizer step
per rollout. No row computes old log-probs: with one update per rollout the ratio is 1.

What the job changes in TRL's defaults: the loss (dapo), the learning rate (1e-6, linear), Adam's
second beta (0.999), use_bias_correction_kl (on), shuffling of prompts (on) and dropout (on: with
GPT-2's default of 0.1, TRL also samples with dropout). TRL's update counts the padding on the left
as positions of a GPT-2, although it samples without: both TRL rows are told the true positions.
With that, its gradient on the same completions is ours (pytest -m peer).

"TRL, as it is" keeps the rest: bfloat16 autocast, gradient checkpointing, micro-batches of 8
completions. "TRL, best" is the fastest of several settings without checkpointing, tried here first.

What differs: the rows draw different random numbers, so they sample different completions. TRL
samples with transformers' generate, and pads all rows to the longest prompt and completion; vLLM,
which needs a GPU, is not compared. This library runs equal prefixes once, and proposes tokens from
the known answer while sampling (the samples stay exact); "tokens run" counts what the update runs.
A step is everything from the prompts to the new weights; logs and checkpoints are not timed."""


def as_it_is(completions: int) -> Settings:
    """What a user of TRL gets who sets only the job: micro-batches of 8, with accumulation."""
    return _in_batches(completions, math.gcd(DEFAULT_BATCH, completions))


def candidates(completions: int) -> list[Settings]:
    """Settings of TRL, of which the fastest is its best row. None of them changes the job."""
    sizes = {completions, math.gcd(completions, max(1, completions // 4))}
    return [
        {**_in_batches(completions, size), "gradient_checkpointing": False, "bf16": bf16}
        for bf16 in (False, True)
        for size in sorted(sizes, reverse=True)
    ]


def _in_batches(completions: int, size: int) -> Settings:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": completions // size}


@dataclass(frozen=True)
class Peers(BenchmarkFlags):
    """Seconds per step, memory and reward of this library and of TRL's GRPOTrainer, in turns."""

    jobs: tuple[Literal["chess", "forced"], ...] = ("chess", "forced")
    """chess: the default job, until end of text; forced: random text and weights, completions of a
    fixed length, with a KL term.
    """
    steps: Annotated[int, AtLeast(WARM_UP + 1)] = 30
    """Training steps per row; the first 2 are not timed."""
    probe_steps: Annotated[int, AtLeast(2)] = 3
    """Steps with which each candidate for TRL's best settings is tried; the first is not timed."""
    preset: Literal["tiny", "gpt2"] = "tiny"
    """Sizes of the forced job."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    prompts_per_step: int | None = None
    """Prompts per step, instead of the job's."""
    group_size: int | None = None
    """Completions per prompt, instead of the job's."""
    max_new_tokens: int | None = None
    """Longest completion in tokens, instead of the job's."""
    out_dir: Path | None = None
    """Folder for peers.md and peers.json; default: benchmarks/results/<device>-<date>."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ConfigError(
                f"peers needs {', '.join(missing)}: install the extra with pip install -e '.[peer]'"
            )
        device = accel.pick_device(self.device)
        machine = probe.describe_machine(device)
        machine["versions"] |= {name: version(name) for name in NEEDED}
        result = {
            **machine,
            "benchmark": "peers",
            "steps": self.steps,
            "jobs": [self._measure(job, console) for job in dict.fromkeys(self.jobs)],
            "notes": NOTES,
        }
        texts = [f"# {result['device']}, TRL {result['versions']['trl']}\n"]
        for job in result["jobs"]:
            after = f"{job['name']}: reward, the same held-out prompts before and after all steps"
            for title, columns in ((f"{job['name']}: {job['work']}", COLUMNS), (after, REWARDS)):
                print_table(console, title, job["rows"], columns)
                texts.append(markdown(title, job["rows"], columns))
            texts.append(f"TRL's best settings here: {in_words(job['best'])}\n")
            console.print(texts[-1], highlight=False)
        console.print(NOTES, highlight=False)
        folder = folder_for(result, self.out_dir)
        (folder / "peers.md").write_text("\n".join([*texts, NOTES, ""]))
        (folder / "peers.json").write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {folder}/peers.md, .json", highlight=False)
        return result

    def _measure(self, job: str, console: Console) -> dict[str, Any]:
        screen = Screen(quiet=console.quiet)
        workload: dict[str, Any] = {"preset": self.preset, "natural": job == "chess"}
        workload |= {name: x for name in SIZES if (x := getattr(self, name)) is not None}
        workload["device"] = self.device
        work = Workload.of(WorkloadFlags(**workload), accel.pick_device("cpu"))
        sampling = work.config.sampling
        completions = sampling.prompts_per_step * sampling.group_size
        asked = {"workload": workload, "schedule_steps": Config().run.max_steps}
        tried = [Row(f"TRL, {in_words(x)}", settings=x) for x in candidates(completions)]
        if len(tried) > 1:
            take_turns(tried, {**asked, "steps": self.probe_steps}, screen, f"{job}, trying")
        best = min(tried, key=seconds_tried)
        rows = [
            Row("minigrpo, defaults"),
            Row("minigrpo, bfloat16", flags={"use_amp": True, "low_precision_weights": True}),
            Row("TRL, as it is", settings=as_it_is(completions)),
            Row("TRL, best", settings=best.settings),
        ]
        take_turns(rows, {**asked, "steps": self.steps}, screen, job)
        return {
            "name": job,
            "work": work.describe(),
            "best": best.settings,
            "tried": [
                {"settings": x.settings, "status": x.status, "seconds": seconds_tried(x)}
                for x in tried
                if x.steps
            ],
            "rows": [record(row, rows[0]) for row in rows],
        }


def seconds_tried(row: Row) -> float:
    """Median seconds of a candidate's steps after the first; infinite if it failed."""
    seconds = [step["seconds"] for step in row.steps[1:]]
    return median(seconds) if seconds and row.status == "ok" else math.inf


def in_words(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())

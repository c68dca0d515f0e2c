"""TRL's GRPOTrainer on the same job: `python benchmark.py peers`.

Each row is a process of its own, which does one training step when it is told to. The rows take
turns, A B C D A B C D, so a machine that slows down slows all of them. The rows of a large job do
not fit into memory together: they run one or two at a time. After the last step of a small job all
models are compared on the same held-out prompts, which shows whether the rows did the same work.
peer_jobs.py has the jobs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
from rich.console import Console

from minigrpo.config import Config
from minigrpo.runtime import accel
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen

from . import probe
from .flags import BenchmarkFlags
from .peer_jobs import JOBS, WAYS, Job, Settings, as_it_is, candidates, in_words, least_memory
from .peer_rows import COLUMNS, REWARDS, Row, record, take_turns
from .report import folder_for, markdown, print_table
from .workload import Workload, WorkloadFlags

NEEDED = ("transformers", "trl", "accelerate", "datasets", "peft")  # the extra `peer`
SIZES = ("prompts_per_step", "group_size", "max_new_tokens")
NOTES = """\
The same in all rows: initial weights, prompts and their order, rewards (this library's scorer),
group size, lengths, temperature, the loss (grpo: the mean over completions of the mean over
tokens; KL by k3), AdamW, learning rate and schedule, clipping to a norm of 1, one optimizer step
per rollout. No row computes old log-probs: with one update per rollout the ratio is 1.

What the job changes in TRL's defaults: the loss (dapo), the learning rate (1e-6, linear), Adam's
second beta (0.999), use_bias_correction_kl (on), shuffling of prompts (on) and dropout (on: with
GPT-2's default of 0.1, TRL also samples with dropout). TRL's update counts the padding on the left
as positions of a GPT-2, although it samples without: all TRL rows are told the true positions.
With that, its gradient on the same completions is ours (pytest -m peer).

A row of TRL is compared with this library's row of the same way to train. It has the fastest of
several settings without checkpointing, tried here first; with checkpointing only if none of them
fits into memory. LoRA has rank 8 on all linear layers of the blocks, on both sides; with bfloat16,
the frozen weights are stored in it. "TRL, as it is" keeps TRL's own settings: bfloat16 autocast,
gradient checkpointing, micro-batches of 8 completions.

What differs: the rows draw different random numbers, so they sample different completions. TRL
samples with transformers' generate, and pads all rows to the longest prompt and completion; vLLM,
which needs a GPU, is not compared. This library runs equal prefixes once. Except on a large model,
it proposes tokens from the known answer while sampling; the samples stay exact. "Tokens run" counts
what the update runs.
A step is everything from the prompts to the new weights; logs and checkpoints are not timed.
Memory is the growth of each row's own process, from before it loads the model."""


@dataclass(frozen=True)
class Peers(BenchmarkFlags):
    """Seconds per step, memory and reward of this library and of TRL's GRPOTrainer, in turns."""

    jobs: tuple[Literal["chess", "forced", "gpt2", "qwen2.5-0.5b"], ...] = ("chess", "forced")
    """chess: the default job, until end of text. The others: random text and weights, completions
    of a fixed length, with a KL term; gpt2 has 124M parameters, qwen2.5-0.5b 494M.
    """
    ways: tuple[Literal["float32", "bfloat16", "lora-float32", "lora-bfloat16"], ...] | None = None
    """Ways to train that are compared, LoRA with rank 8; default: all, or for the first two jobs
    those without LoRA.
    """
    steps: Annotated[int | None, AtLeast(3)] = None
    """Training steps per row; default: the job's, 30 or 4. The first 2 (of 4: 1) are not timed."""
    probe_steps: Annotated[int | None, AtLeast(2)] = None
    """Steps with which each candidate for TRL's best settings is tried; the first is not timed."""
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
            "made_by": probe.made_by(self.command()),
            "jobs": [self._measure(job, console) for job in dict.fromkeys(self.jobs)],
            "notes": NOTES,
        }
        texts = [f"# {result['device']}, TRL {result['versions']['trl']}\n", result["made_by"], ""]
        for job in result["jobs"]:
            after = f"{job['name']}: reward, the same held-out prompts before and after all steps"
            tables = [(f"{job['name']}: {job['work']}", COLUMNS), (after, REWARDS)]
            for title, columns in tables[: 2 if JOBS[job["name"]].held_out else 1]:
                print_table(console, title, job["rows"], columns)
                texts.append(markdown(title, job["rows"], columns))
            for way, settings in job["best"].items():
                texts.append(f"TRL's best settings here, {way}: {in_words(settings)}\n")
                console.print(texts[-1], highlight=False)
        console.print(NOTES, highlight=False)
        folder = folder_for(result, self.out_dir)
        (folder / "peers.md").write_text("\n".join([*texts, NOTES, ""]))
        (folder / "peers.json").write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {folder}/peers.md, .json", highlight=False)
        return result

    def _measure(self, name: str, console: Console) -> dict[str, Any]:
        job, screen = JOBS[name], Screen(quiet=console.quiet)
        sizes = {size: x for size in SIZES if (x := getattr(self, size)) is not None}
        workload = {**job.workload, **sizes, "device": self.device}
        # only to describe it: the rows' processes make their own
        work = Workload.of(WorkloadFlags(**workload), torch.device("meta"))
        sampling = work.config.sampling
        completions = sampling.prompts_per_step * sampling.group_size
        asked = {"workload": workload, "schedule_steps": Config().run.max_steps}
        rows, compared, best, tried = list[Row](), list[Row](), dict[str, Settings](), list[Row]()
        for way in self.ways or job.ways:
            ours = Row(f"minigrpo, {way}", flags={**job.flags, **WAYS[way].flags})
            fastest, others = self._fastest(job, way, completions, asked, screen, f"{name}, {way}")
            rows += [ours, Row(f"TRL, {way}", settings=fastest.settings, status=fastest.status)]
            compared += [ours, ours]
            if fastest.status == "ok":
                best[way] = fastest.settings or {}
            else:
                words = "; ".join(in_words(row.settings or {}) for row in others)
                rows[-1].status += f" (tried: {words})"
            tried += others
        if job.as_it_is:
            rows.append(Row("TRL, as it is", settings=as_it_is(completions)))
            compared.append(rows[0])
        steps = {**asked, "steps": self.steps or job.steps, "held_out": job.held_out}
        in_groups(rows, job, steps, screen, name)
        return {
            "name": name,
            "work": work.describe(),
            "steps": steps["steps"],
            "best": best,
            "tried": [as_tried(row) for row in tried],
            "rows": [record(*pair) for pair in zip(rows, compared, strict=True)],
        }

    def _fastest(
        self,
        job: Job,
        way: str,
        completions: int,
        asked: Mapping[str, Any],
        screen: Screen,
        title: str,
    ) -> tuple[Row, list[Row]]:
        """Of the settings of TRL the fastest, as a row that was tried, and all that were tried."""
        steps = {**asked, "steps": self.probe_steps or job.probe_steps, "held_out": 0}
        tried = list[Row]()
        lean = least_memory(WAYS[way], completions)
        for settings in (candidates(WAYS[way], completions), [lean]):
            rows = [Row(f"TRL, {in_words(x)}", settings=x) for x in settings]
            in_groups(rows, job, steps, screen, f"{title}, trying")
            tried += rows
            if any(row.status == "ok" for row in rows):
                break
        return min(tried, key=seconds_tried), tried


def in_groups(
    rows: Sequence[Row], job: Job, asked: Mapping[str, Any], screen: Screen, title: str
) -> None:
    """Let rows take turns, as many at once as the job says."""
    for start in range(0, len(rows), job.at_once):
        group = rows[start : start + job.at_once]
        take_turns(group, asked, screen, title, warm_up=job.warm_up)


def as_tried(row: Row) -> dict[str, Any]:
    """A candidate's figures as plain JSON."""
    seconds = seconds_tried(row) if row.status == "ok" else None
    return {"settings": row.settings, "status": row.status, "seconds": seconds}


def seconds_tried(row: Row) -> float:
    """Median seconds of a candidate's steps after the first; infinite if it failed."""
    seconds = [step["seconds"] for step in row.steps[1:]]
    return median(seconds) if seconds and row.status == "ok" else math.inf

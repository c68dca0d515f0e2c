"""Memory of a step: `python benchmark.py memory`.

Four ways of sampling k completions per prompt, each with all logits at once and in chunks:

    prompts repeated         each prompt runs once; every completion gets a copy of its KV cache
    one after the other      k passes over the prompts, one completion each
    repeated by the loader   k times as many prompts, as from a data loader that repeats them
    stored once (ours)       --share-prompt-kv: a prompt's KV cache is stored once, and the update
                             runs each prompt once

The first three train on repeated rows. All four sample the same tokens and must have the same loss
on the same rollout; otherwise the benchmark fails.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from minigrpo.model.logprobs import chunk_size, token_logprobs
from minigrpo.runtime import accel
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.logging import PhaseTimer
from minigrpo.runtime.oom import is_out_of_memory
from minigrpo.sampling.sampler import Sampler
from minigrpo.types import Completions, Example

from . import probe
from .bench_step import BenchStep
from .flags import Positive
from .memory_report import write_memory
from .workload import Workload, WorkloadFlags

READINGS_PER_S = 500  # memory readings per second, for the timeline
POINTS_KEPT = 100  # per timeline
ROUNDING = 1e-4  # relative difference up to which two losses count as equal
FROZEN_LR = 1e-30  # a learning rate that leaves float32 weights as they are


class OneAfterTheOther(Sampler):
    """Samples one completion of all prompts, then the next one."""

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        **options: Any,
    ) -> Iterator[Completions]:
        assert u is not None
        complete = super().complete
        passes = [
            Completions.join(list(complete(examples, u=u[:, g : g + 1], **options)))
            for g in range(num_samples)
        ]
        yield _regroup(Completions.join(passes), num_samples, by_sample=True)


class RepeatedByLoader(Sampler):
    """Samples as if every completion had its own prompt."""

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        **options: Any,
    ) -> Iterator[Completions]:
        assert u is not None
        many = [example for example in examples for _ in range(num_samples)]
        options["batch_size"] = options.get("batch_size", 0) * num_samples
        parts = list(super().complete(many, u=u.reshape(-1, 1, u.shape[2]), **options))
        yield _regroup(Completions.join(parts), num_samples, by_sample=False)


def _regroup(one_each: Completions, num_samples: int, *, by_sample: bool) -> Completions:
    """One completion for each of P * G prompts -> G completions for each of P prompts."""
    prompts = len(one_each) // num_samples
    first = torch.arange(prompts) if by_sample else torch.arange(prompts) * num_samples

    def grouped(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = x[:, 0]
        return (
            x.unflatten(0, (num_samples, prompts)).transpose(0, 1)
            if by_sample
            else x.unflatten(0, (prompts, num_samples))
        )

    fields: dict[str, Any] = {
        n: grouped(getattr(one_each, n))
        for n in ("completion_ids", "completion_mask", "sampler_logp")
    }
    return Completions(one_each.prompt_ids[first], one_each.prompt_len[first], **fields)


REPEATED: dict[str, Any] = {"packing": "repeated"}
WAYS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "prompts repeated": (Sampler, REPEATED),
    "one after the other": (OneAfterTheOther, REPEATED),
    "repeated by the loader": (RepeatedByLoader, REPEATED),
    "stored once (ours)": (Sampler, {"packing": "shared-prompt", "share_prompt_kv": True}),
}


class Timeline(PhaseTimer):
    """A phase timer that also records the memory in use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.now = ""  # the phase
        self.readings = list[tuple[float, float, str]]()  # seconds, MiB, phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.now = name
        with super().phase(name):
            yield
        self.now = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Read the memory in use, above what it is now, from a thread."""
        self.readings.clear()
        done, start = threading.Event(), time.perf_counter()
        before = probe.memory_in_use(self.device)

        def record() -> None:
            while not done.wait(1 / READINGS_PER_S):
                used = probe.memory_in_use(self.device) - before
                seconds = time.perf_counter() - start
                self.readings.append((round(seconds, 4), round(used, 1), self.now))

        thread = threading.Thread(target=record, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@dataclass(frozen=True)
class Memory(WorkloadFlags):
    """Peak memory and seconds per step by group size, for four ways of sampling, and memory over
    time.
    """

    group_sizes: Annotated[tuple[int, ...], AtLeast(2)] = (2, 4, 8, 16, 32, 64)
    """Completions per prompt; --group-size is not used."""
    repeats: Positive = 2
    """Timed steps per row, after two that warm up."""
    out_dir: Path | None = None
    """Folder for tables, charts and figures; default: benchmarks/results/<device>-<date>."""
    json: Path | None = None
    """Write the figures here too."""

    def run(self, console: Console) -> dict[str, Any]:
        device = accel.pick_device(self.device)
        first = Workload.of(replace(self, group_size=self.group_sizes[0]), device)
        text = first.describe(", ".join(map(str, self.group_sizes)))
        console.print(f"{probe.device_name(device)}: {text}", highlight=False)
        rows, timelines = list[dict[str, Any]](), dict[str, Any]()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("group sizes", total=2 * len(WAYS) * len(self.group_sizes))
            for size in self.group_sizes:
                work = replace(first, config=first.config.replace(group_size=size))
                baseline = _Baseline()
                for way in WAYS:
                    for chunked in (False, True):
                        row, readings = _measure(work, way, chunked, self.repeats, baseline)
                        rows.append(row)
                        if not chunked and readings:
                            timelines[way] = {"group_size": size, "readings": readings}
                        progress.advance(bar)
        result = {**probe.describe_machine(device), "measures": probe.PeakMemory(device).measures}
        result |= {
            "made_by": probe.made_by(self.command()),
            "work": first.to_dict() | {"text": text},
        }
        with console.status("log-probs alone"):
            result |= {"rows": rows, "timelines": timelines, "logprobs": logprobs_alone(device)}
        write_memory(result, self.out_dir, console)
        return result


def logprobs_alone(
    device: torch.device, tokens: int = 2048, vocab_size: int = 50257, width: int = 768
) -> dict[str, Any]:
    """Peak memory and seconds of log-probs and their gradient, with all logits at once and in
    chunks; by default at GPT-2's sizes.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(n, width, generator=generator).to(device) for n in (tokens, vocab_size)
    )
    targets = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    gradients, rows = list[list[torch.Tensor]](), list[dict[str, Any]]()
    for name, chunk in (("all", 0), ("in chunks", chunk_size(vocab_size, device.type))):
        inputs = [(0.05 * x).requires_grad_() for x in (hidden, head)]

        def once(inputs: list[torch.Tensor] = inputs, chunk: int = chunk) -> None:
            inputs[0].grad = inputs[1].grad = None
            logp, _ = token_logprobs(inputs[0], inputs[1], targets, 1.0, chunk)
            (logp * logp.detach()).sum().backward()

        took = probe.seconds(once, device, repeats=2)
        inputs[0].grad = inputs[1].grad = None
        with probe.PeakMemory(device) as peak:
            once()
        rows.append({"logits": name, "peak_mib": peak.mib, "seconds": took})
        gradients.append([x.grad for x in inputs if x.grad is not None])
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*gradients, strict=True)]
    return {
        "tokens": tokens,
        "vocab_size": vocab_size,
        "width": width,
        "rows": rows,
        "gradient_difference": max(apart),
    }


class _Baseline:
    """Compares the tokens and loss of every way with those of the first way, per group size."""

    def __init__(self) -> None:
        self.first: Any = None

    def check(self, bench: BenchStep, name: str) -> int:
        """How many completions differ from the first way's.

        Raises AssertionError if the loss on the same rollout differs.
        """
        if self.first is None:
            self.first = bench.tokens(), bench.batch, bench.gradient(bench.batch)[0]
        tokens, batch, loss = self.first
        if abs(bench.gradient(batch)[0] - loss) > ROUNDING * abs(loss):
            raise AssertionError(f"{name}: the loss differs")
        return int((bench.tokens() != tokens).any(-1).sum())


def _measure(
    work: Workload, way: str, chunked: bool, repeats: int, baseline: _Baseline
) -> tuple[dict[str, Any], list[tuple[float, float, str]]]:
    """A row, and the memory over time of one step; a row that runs out of memory says so."""
    sampler, flags = WAYS[way]
    changes = {"chunked_logprobs": chunked, "speculate": "none"}
    config = work.config.replace(**flags, **changes, learning_rate=FROZEN_LR)
    row: dict[str, Any] = {
        "name": way,
        "logits": "in chunks" if chunked else "all",
        "group_size": work.config.sampling.group_size,
    }
    bench: BenchStep | None = None
    try:
        with probe.PeakMemory(work.device) as built:
            bench = BenchStep(config, work, sampler)
            timeline = bench.timer = bench.source.timer = Timeline(work.device)
            bench.step(0)
        resident = probe.memory_in_use(work.device) - built.before
        with probe.PeakMemory(work.device) as peak, timeline.recording():
            bench.step(1)
        # timed separately: measuring the peak returns freed memory to the system, which takes time
        steps = [bench.step(turn) for turn in range(2, repeats + 2)]
        row["peak_mib"] = peak.mib + (resident if work.device.type == "cuda" else 0)
        for key, name in (("s_per_step", "seconds"), ("rollout", "rollout"), ("update", "update")):
            row[key] = median(step.get(name, 0.0) for step in steps)
        row |= {"different_completions": baseline.check(bench, way), "status": "ok"}
        return row, timeline.readings[:: max(1, len(timeline.readings) // POINTS_KEPT)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise  # otherwise the traceback holds the model's memory; it is freed below
    bench = None
    torch.cuda.empty_cache()
    return {**row, "status": "out of memory"}, []

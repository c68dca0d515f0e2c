"""Memory of a step by group size: `python benchmark.py memory`.

Three ways of sampling k completions per prompt:

    repeated by the loader   k times as many prompts, as from a data loader that repeats them
    one after the other      k passes over the prompts, one completion each
    stored once (ours)       a prompt's keys and values are stored once, the update runs it once

The first two train on repeated rows. All sample the same tokens and must have the same loss on the
same rollout; otherwise the benchmark fails.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from minigrpo.sampling.generate import Sampler
from minigrpo.types import Completions, Example

from .measure import Column, PeakMemory, device_name, number, show
from .work import FROZEN_LR, Step, Work, WorkFlags

ROUNDING = 1e-4  # relative difference up to which two losses count as equal


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
        yield regroup(Completions.join(passes), num_samples, by_sample=True)


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
        parts = list(super().complete(many, u=u.reshape(-1, 1, u.shape[2]), **options))
        yield regroup(Completions.join(parts), num_samples, by_sample=False)


def regroup(one_each: Completions, num_samples: int, *, by_sample: bool) -> Completions:
    """One completion for each of P * G prompts -> G completions for each of P prompts."""
    prompts = len(one_each) // num_samples
    first = torch.arange(prompts) if by_sample else torch.arange(prompts) * num_samples

    def grouped(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        if by_sample:
            return x[:, 0].unflatten(0, (num_samples, prompts)).transpose(0, 1)
        return x[:, 0].unflatten(0, (prompts, num_samples))

    names = ("completion_ids", "completion_mask", "sampler_logp")
    fields: dict[str, Any] = {name: grouped(getattr(one_each, name)) for name in names}
    return Completions(one_each.prompt_ids[first], one_each.prompt_len[first], **fields)


WAYS: dict[str, tuple[type[Sampler], str]] = {
    "repeated by the loader": (RepeatedByLoader, "repeated"),
    "one after the other": (OneAfterTheOther, "repeated"),
    "stored once (ours)": (Sampler, "prefix-tree"),
}
COLUMNS: tuple[Column, ...] = (
    ("completions per prompt", "group_size", str),
    ("prompts are", "name", str),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("of repeated", "share", number("{:.2f}")),
    ("s/step", "seconds", number("{:.2f}")),
    ("rollout", "rollout", number("{:.2f}")),
    ("update", "update", number("{:.2f}")),
    ("other completions", "different", number("{}")),
)


@dataclass(frozen=True)
class Memory(WorkFlags):
    """Peak memory and seconds per step by group size, for three ways of storing prompts."""

    group_sizes: tuple[int, ...] = (2, 8, 16, 64)
    """Completions per prompt; --group-size is not used."""
    repeats: int = 2
    """Timed steps per row, after two that warm up."""

    def run(self, console: Console) -> dict[str, Any]:
        first = Work.of(replace(self, group_size=self.group_sizes[0]))
        rows = list[dict[str, Any]]()
        for size in track(self.group_sizes, "group sizes", console=console, transient=True):
            work = replace(first, config=first.config.replace(group_size=size))
            baseline = None
            for name in WAYS:
                row, baseline = self._measure(work, name, baseline)
                rows.append({"group_size": size, "name": name, **row})
            repeated = rows[-len(WAYS)]
            for row in rows[-len(WAYS) :]:
                row["share"] = row["peak_mib"] / repeated["peak_mib"]
        title = f"{device_name(first.device)}: {first.describe()}; by completions per prompt"
        table = show(console, title, rows, COLUMNS)
        return {"device": device_name(first.device), "rows": rows, "tables": [table]}

    def _measure(self, work: Work, name: str, baseline: Any) -> tuple[dict[str, Any], Any]:
        sampler, packing = WAYS[name]
        settings = {"packing": packing, "num_speculative_tokens": 0, "learning_rate": FROZEN_LR}
        with PeakMemory(work.device) as built:
            step = Step(work.config.replace(**settings), work, sampler)
            step.step(0)
        with PeakMemory(work.device) as peak:
            step.step(1)
        # timed separately: measuring the peak returns freed memory to the system, which takes time
        times = [step.step(turn) for turn in range(2, self.repeats + 2)]
        resident = peak.before - built.before if work.device.type == "cuda" else 0.0
        loss = step.gradient(baseline[0] if baseline else step.batch)[0]
        baseline = baseline or (step.batch, step.tokens(), loss)
        assert abs(loss - baseline[2]) <= ROUNDING * abs(baseline[2]), f"{name}: the loss differs"
        row = {key: median(t[key] for t in times) for key in ("seconds", "rollout", "update")}
        different = int((step.tokens() != baseline[1]).any(-1).sum())
        return {**row, "peak_mib": peak.mib + resident, "different": different}, baseline

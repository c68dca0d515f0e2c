"""Memory of a step by group size: `python benchmark.py memory`.

Prompts are repeated for each completion, as by a data loader; or (ours) their keys and values are
stored once, and the update runs them once. Both sample the same tokens. If their losses on the same
rollout differ, the benchmark fails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from minigrpo.sampling.sampler import Sampled, Sampler
from minigrpo.types import Completions, Example, RolloutBatch

from .measure import Column, device_name, show
from .work import FROZEN_LR, Step, Work, WorkFlags, allocated, peak_of


class RepeatedByLoader(Sampler):
    """Samples as if every completion had its own prompt."""

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int,
        uniforms: np.ndarray | None,
        **options: Any,
    ) -> Sampled:
        assert uniforms is not None
        many = [example for example in examples for _ in range(num_samples)]
        # one completion for each of P * G prompts
        numbers = uniforms.reshape(-1, 1, uniforms.shape[2])
        sampled = super().complete(many, num_samples=1, uniforms=numbers, **options)
        each = sampled.completions
        names = ("completion_ids", "completion_mask", "sampler_logp")
        grouped: dict[str, Any] = {
            name: getattr(each, name)[:, 0].unflatten(0, (-1, num_samples)) for name in names
        }
        prompts = each.prompt_ids[::num_samples], each.prompt_len[::num_samples]
        flat = [text for (text,) in sampled.texts]
        groups = [flat[i : i + num_samples] for i in range(0, len(flat), num_samples)]
        return replace(sampled, completions=Completions(*prompts, **grouped), texts=groups)


COLUMNS: tuple[Column, ...] = (
    ("completions per prompt", "group_size", "{}"),
    ("prompts are", "name", "{}"),
    ("peak MiB", "peak_mib", "{:,.0f}"),
    ("s/step", "seconds", "{:.2f}"),
    ("rollout", "rollout", "{:.2f}"),
    ("update", "update", "{:.2f}"),
)


@dataclass(frozen=True)
class Memory(WorkFlags):
    """Peak memory and seconds per step by group size, for two ways of storing prompts."""

    group_sizes: tuple[int, ...] = (2, 8, 16, 64)
    """Completions per prompt; --group-size is not used."""
    repeats: int = 2
    """Timed steps per row, after two that warm up."""

    def run(self, console: Console) -> dict[str, Any]:
        first = Work.of(replace(self, group_size=self.group_sizes[0]))
        rows = list[dict[str, Any]]()
        for size in track(self.group_sizes, "group sizes", console=console, transient=True):
            work = replace(first, job=first.with_flags(first.config.replace(group_size=size)))
            repeated, batch = self._measure(work, RepeatedByLoader, "repeated")
            once, _ = self._measure(work, Sampler, "prefix-tree", batch)
            assert math.isclose(once["loss"], repeated["loss"], rel_tol=1e-4), "the losses differ"
            rows.append({"group_size": size, "name": "repeated by the loader", **repeated})
            rows.append({"group_size": size, "name": "stored once (ours)", **once})
        title = f"{device_name(first.device)}: {first.describe()}; by completions per prompt"
        table = show(console, title, rows, COLUMNS)
        return {"device": device_name(first.device), "rows": rows, "tables": [table]}

    def _measure(
        self, work: Work, sampler: type[Sampler], packing: str, batch: RolloutBatch | None = None
    ) -> tuple[dict[str, Any], RolloutBatch]:
        """A way's figures, with its loss on a rollout, and that rollout; by default its last."""
        settings = {"packing": packing, "num_speculative_tokens": 0, "learning_rate": FROZEN_LR}
        before = allocated(work.device)
        step = Step(work.config.replace(**settings), work, sampler)
        peak_mib = peak_of(step, work.device, before)
        times = [step.step(turn) for turn in range(2, self.repeats + 2)]
        batch = batch or step.batch
        loss = step.gradient(batch)[0]
        keys = ("seconds", "rollout", "update")
        medians = {key: median(timed[key] for timed in times) for key in keys}
        return {"peak_mib": peak_mib, "loss": loss, **medians}, batch

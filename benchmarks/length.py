"""How sampling scales with the length of completions: `python benchmark.py length`.

    forced    every completion has the full length, and all are decoded side by side
    ragged    completions end at random, after a quarter of the limit on average, and not all fit:
              batch after batch, each as long as its longest completion, or continuous batching, in
              which waiting prompts enter as completions end

A token of a random model must attend to its prompt and to the completion before it. If nothing is
wasted, the time per token is a constant plus a constant times those keys: a straight line. The
model's probabilities are almost uniform, so the number of stop tokens sets the mean length.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.accel import pick_device
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.rng import uniforms
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder
from minigrpo.sampling.generate import generate
from minigrpo.types import Completions

from . import probe
from .flags import BenchmarkFlags, Positive

FORCED, BATCHES, CONTINUOUS = "forced", "ragged, batch after batch", "ragged, continuous"
RAGGED_MEAN = 0.25  # mean length of ragged completions before they are cut, as a share of the limit
TIMES_MORE = 3  # ragged prompts, over those that are decoded together
MOST_DIFFERENT = 0.1  # share of the completions that rounding may change


@dataclass(frozen=True)
class Length(BenchmarkFlags):
    """Seconds per sampled token and peak memory, by the longest completion."""

    lengths: Annotated[tuple[int, ...], AtLeast(8)] = (256, 512, 1024, 2048)
    """Longest completions in tokens."""
    prompts_at_once: Positive = 4
    """Prompts decoded together; ragged completions are sampled for three times as many."""
    group_size: Positive = 4
    """Completions per prompt."""
    prompt_len: Positive = 64
    """Tokens per prompt."""
    layers: Positive = 4
    """Blocks of the model, whose weights are random."""
    width: Annotated[int, AtLeast(32)] = 128
    """Size of the residual stream, in heads of 32."""
    vocab_size: Annotated[int, AtLeast(2)] = 512
    """Tokens in the vocabulary."""
    share_prompt_kv: bool = False
    """Store a prompt's keys and values once for all of its completions."""
    repeats: Positive = 1
    """Times that each row is measured; the median counts."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        device = pick_device(self.device)
        model = self._model(device)
        rows = list[dict[str, Any]]()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("lengths", total=(len(self.lengths) + 1) * self.repeats)
            self._rows(model, min(self.lengths))  # warms up
            for length in self.lengths:
                repeats = list[list[dict[str, Any]]]()
                for _ in range(self.repeats):
                    repeats.append(self._rows(model, length))
                    progress.advance(bar)
                rows += [_median(row) for row in zip(*repeats, strict=True)]
        line = fit([row for row in rows if row["name"] == FORCED])
        console.print(self._table(rows, line, device))
        console.print(line["text"], highlight=False)
        made_by = probe.made_by(self.command())
        return {**probe.describe_machine(device), "made_by": made_by, "rows": rows, "line": line}

    def _model(self, device: torch.device) -> Transformer:
        context = self.prompt_len + max(self.lengths)
        heads = self.width // 32
        shape = ModelShape(self.vocab_size, context, self.layers, 32 * heads, heads)
        return Transformer(shape, seed=0).to(device)

    def _rows(self, model: Transformer, length: int) -> list[dict[str, Any]]:
        """Sample once in each way. Raises AssertionError if the ragged completions differ."""
        at_once, all_prompts = self.prompts_at_once, TIMES_MORE * self.prompts_at_once
        one_batch = [slice(0, all_prompts)]
        batches = [slice(n, n + at_once) for n in range(0, all_prompts, at_once)]
        rows = {
            FORCED: self._sample(model, length, ends=0, batches=batches[:1]),
            BATCHES: self._sample(model, length, ends=self._ends(length), batches=batches),
            CONTINUOUS: self._sample(model, length, ends=self._ends(length), batches=one_batch),
        }
        a, b = (_tokens(rows[name]["completions"]) for name in (BATCHES, CONTINUOUS))
        # rounding picks another token where a random number is next to a boundary
        if a.shape != b.shape or float((a != b).any(-1).float().mean()) > MOST_DIFFERENT:
            raise AssertionError(f"ragged completions of at most {length} tokens differ")
        return [
            {"name": name, "length": length, **{k: x for k, x in row.items() if k != "completions"}}
            for name, row in rows.items()
        ]

    def _ends(self, length: int) -> int:
        """How many tokens end a ragged completion."""
        return max(1, round(self.vocab_size / (RAGGED_MEAN * length)))

    def _sample(
        self, model: Transformer, length: int, *, ends: int, batches: Sequence[slice]
    ) -> dict[str, Any]:
        """Time and memory of sampling one batch of prompts after the other."""
        prompts = batches[-1].stop
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (prompts, self.prompt_len), generator=draw)
        lengths = torch.full((prompts,), self.prompt_len)
        u = torch.from_numpy(uniforms(0, "length", 0, np.arange(prompts), self.group_size, length))
        decoder = SharedPrefixDecoder if self.share_prompt_kv else ReplicatedPrefixDecoder
        parts, work = list[Completions](), Counter[str]()
        with probe.PeakMemory(model.device) as peak:
            began = time.perf_counter()
            for batch in batches:
                part = generate(
                    model,
                    ids[batch],
                    lengths[batch],
                    stops=range(ends),
                    max_new_tokens=length,
                    num_samples=self.group_size,
                    prompts_at_once=self.prompts_at_once,
                    u=u[batch],
                    decoder=decoder,
                    work=work,
                )
                parts.append(part.to("cpu"))
            seconds = time.perf_counter() - began
        completions = Completions.join(parts)
        own = completions.completion_mask.sum(-1).double()
        tokens = int(own.sum())
        return {
            "seconds": seconds,
            "tokens": tokens,
            "us_per_token": 1e6 * seconds / tokens,
            # of a completion of n tokens: its prompt, and 0 to n - 1 tokens of its own
            "keys_per_token": float((own * (self.prompt_len + (own - 1) / 2)).sum() / tokens),
            "rounds": work["rounds"],
            "peak_mib": peak.mib,
            "completions": completions,
        }

    def _table(
        self, rows: Sequence[dict[str, Any]], line: dict[str, Any], device: torch.device
    ) -> Table:
        side_by_side = self.prompts_at_once * self.group_size
        title = (
            f"{probe.device_name(device)}: {self.layers} layers, width {self.width}, "
            f"prompts of {self.prompt_len} tokens, {side_by_side} completions side by side"
        )
        table = Table(title=title, title_justify="left")
        for name in ("longest", "completions", "tokens", "rounds", "µs per token"):
            table.add_column(name, justify="left" if name == "completions" else "right")
        for name in ("keys per token", "beside the line", "peak MiB"):
            table.add_column(name, justify="right")
        for row in rows:
            at = line["fixed"] + line["per_key"] * row["keys_per_token"]
            table.add_row(
                str(row["length"]),
                row["name"],
                f"{row['tokens']:,}",
                f"{row['rounds']:,}",
                f"{row['us_per_token']:.0f}",
                f"{row['keys_per_token']:.0f}",
                f"{row['us_per_token'] / at:.2f}" if at else "",
                f"{row['peak_mib']:.0f}",
            )
        return table


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line through the time per token over the keys per token, by least squares.

    Returns `fixed` in microseconds, `per_key` in microseconds, the largest `deviation` of a row as
    a share, and the three in words. With a single row, the line is flat.
    """
    keys = np.array([row["keys_per_token"] for row in rows])
    times = np.array([row["us_per_token"] for row in rows])
    slope, fixed = np.polyfit(keys, times, 1) if len(rows) > 1 else (0.0, times[0])
    deviation = float(np.abs(times / (fixed + slope * keys) - 1).max())
    text = (
        f"forced completions: {fixed:.0f} µs + {1000 * slope:.0f} ns per key that a token attends "
        f"to; every length is within {deviation:.0%} of that line"
    )
    return {"fixed": float(fixed), "per_key": float(slope), "deviation": deviation, "text": text}


def _tokens(completions: Completions) -> torch.Tensor:
    """`[P, G, S]`, -1 beyond the end."""
    return completions.completion_ids.masked_fill(~completions.completion_mask, -1)


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several measurements; what is not measured is equal in all."""
    measured = ("seconds", "us_per_token", "peak_mib")
    return {**rows[0], **{name: median(row[name] for row in rows) for name in measured}}

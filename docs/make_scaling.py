"""Calculate what a step costs on 1, 2, 8 and 64 cards: `python docs/make_scaling.py`.

It writes the tables of docs/scaling.md, each after a line `<!-- table of NAME -->`. Nothing is
measured: counts, FLOPs and memory are those of `minigrpo plan`, and a card is the numbers that its
maker publishes. tests/test_docs.py checks that the committed tables are up to date.

`python docs/make_scaling.py shares` counts how unequal the shares of two processes are.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from minigrpo import Config, Trainer
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.base_model import add_lora
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.estimate import Estimate
from minigrpo.runtime.planner import Planner
from minigrpo.sampling.decoders import SharedPrefixDecoder
from minigrpo.sampling.generate import generate
from minigrpo.tools.plan import fits
from minigrpo.types import Completions

PAGE = Path(__file__).with_name("scaling.md")
MEASURED = PAGE.parents[1] / "benchmarks" / "results" / "scaling-2-cpu-cores.json"
MARK = re.compile(r"^(<!-- table of (.+) -->\n)(?:\|.*\n)*", re.MULTILINE)
SIZES = (1, 2, 8, 64)
LOW, FLOAT, ADAMW = 2, 4, 28  # bytes: of bfloat16, of float32, read and written per weight
RECOMPUTED = 4 / 3  # of an update with --gradient-checkpointing: a second forward
LAUNCH = 3.8e-6  # seconds of a short kernel that is launched without waiting for the one before


@dataclass(frozen=True)
class Card:
    """A card and its surroundings; rates are per second, links count one direction."""

    flops: float  # bfloat16 products, summed up in float32, dense
    memory: float  # bytes
    gigabytes: int
    per_machine: int
    inside: float  # bytes between cards of a machine, per card
    between: float  # bytes between machines, per machine
    host: float  # bytes between card and host


CARDS = {
    "RTX 4090": Card(165.2e12, 1008e9, 24, 2, inside=31.5e9, between=1.25e9, host=31.5e9),
    "H100 SXM": Card(989e12, 3350e9, 80, 8, inside=450e9, between=400e9, host=63e9),
}
JOB = "--device cuda --prompts-per-step 64 --low-precision-weights --kl-coef 0"
FULL, LORA = f"--config qwen2.5-0.5b {JOB}", f"--config qwen2.5-7b-lora {JOB}"
MODELS = {
    "0.5B": f"{FULL} --init-from Qwen/Qwen2.5-0.5B",
    "1.5B": f"{FULL} --init-from Qwen/Qwen2.5-1.5B",
    "1.5B, offloaded": f"{FULL} --init-from Qwen/Qwen2.5-1.5B --offload-optimizer",
    "7B": f"{FULL} --init-from Qwen/Qwen2.5-7B",
    "7B, LoRA": f"{LORA} --init-from Qwen/Qwen2.5-7B --max-new-tokens 512",
}
ROWS = {
    "RTX 4090": ("0.5B", "1.5B", "1.5B, offloaded", "7B, LoRA"),
    "H100 SXM": ("0.5B", "1.5B", "7B", "7B, LoRA"),
}


@cache
def plan(flags: str, cards: int, at_once: int) -> tuple[Estimate, Config, ModelShape]:
    """One process's share of a step, with so many prompts sampled together."""
    words = [*flags.split(), "--rollout-batch-size", str(at_once)]
    config = Config.from_cli(words)
    job = Planner(config, DistContext(world_size=cards)).job
    return job.worst, config, job.shape


def share_that_fits(flags: str, card: Card, cards: int) -> tuple[Estimate, Config, ModelShape]:
    """The plan that samples the most prompts together; the smallest one if none fits."""
    at_once = 64 // cards
    while at_once > 1 and not fits(plan(flags, cards, at_once)[0].peak_mib, card.gigabytes):
        at_once //= 2
    return plan(flags, cards, at_once)


class Kernels(TorchDispatchMode):
    """Counts the operations that are no mere views: on a GPU, each launches a kernel or more."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [out.alias_info for out in func._schema.returns]
        self.count += not any(alias and not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))


def kernels_of(shape: ModelShape, config: Config, new_tokens: int) -> int:
    """Operations while a few completions of so many tokens are sampled, in float32 on the host."""
    model = Transformer(shape)
    add_lora(model, replace(config.model, base_dtype="float32"))
    prompts = torch.zeros(2, 4, dtype=torch.int64)
    with Kernels() as kernels:
        generate(
            model,
            prompts,
            torch.full((2,), 4),
            stops=(),
            max_new_tokens=new_tokens,
            num_samples=2,
            u=torch.full((2, 2, new_tokens), 0.5),
            decoder=SharedPrefixDecoder,
        )
    return kernels.count


@cache
def kernels_per_round(flags: str) -> tuple[int, int]:
    """Operations in a round of decoding: per layer, and besides."""
    _, config, shape = plan(flags, 1, 1)
    heads = shape.heads // shape.kv_heads
    small = replace(
        shape, vocab_size=50, context=64, width=16 * heads, heads=heads, kv_heads=1, head_dim=16
    )
    rounds = 4  # as often as finished completions are looked for
    one, two = (
        (kernels_of(model, config, 2 * rounds) - kernels_of(model, config, rounds)) // rounds
        for model in (replace(small, layers=1), replace(small, layers=2))
    )
    return two - one, 2 * one - two


def rollout(
    card: Card, shape: ModelShape, *, completions: float, rounds: float, prompt: float, new: float
) -> float:
    """Seconds that decoding reads memory: all weights per round, and keys and values per token."""
    cached = completions * new * (prompt + new / 2) * 2 * shape.layers * shape.kv_width
    return LOW * (rounds * shape.num_parameters + cached) / card.memory


def exchange(card: Card, cards: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring in each machine, and one of machines."""
    inside, machines = min(cards, card.per_machine), -(-cards // card.per_machine)
    within = 2 * (inside - 1) / inside * size / card.inside
    return within + 2 * (machines - 1) / machines * size / card.between


def seconds(
    card: Card, cards: int, share: Estimate, config: Config, shape: ModelShape
) -> dict[str, float]:
    """Seconds of a step by phase, none of which overlaps another; without launches."""
    counts, run = share.counts, config.run
    lengths = {"prompt": counts.prompt_len, "new": counts.completion_len}
    reads = rollout(card, shape, completions=counts.completions, rounds=counts.rounds, **lengths)
    moments = ADAMW * share.trained / card.memory
    if config.memory.offload_optimizer:  # two moments, there and back
        moments += 4 * FLOAT * share.trained / card.host
    evaluated = rollout(
        card, shape, completions=run.eval_size_during, rounds=counts.completion_len, **lengths
    )
    tokens = run.eval_size_during * (counts.prompt_len + counts.completion_len)
    evaluated += 2 * tokens * shape.num_parameters / card.flops
    return {
        "roll-out": reads + share.flops["rollout"] / card.flops,
        "update": RECOMPUTED * share.flops["update"] / card.flops + moments,
        "exchange": exchange(card, cards, FLOAT * share.trained),
        "evaluation": 2 * evaluated / run.eval_every,  # greedy and sampled, by one rank
    }


def step_table(name: str) -> list[list[str]]:
    """A row per model and number of cards."""
    card = CARDS[name]
    rows = [["model", "cards", "prompts at once", "launches", *PHASES, "step", "efficiency"]]
    for model in ROWS[name]:
        in_layer, besides = kernels_per_round(MODELS[model])
        one = 0.0
        for cards in SIZES:
            share, config, shape = share_that_fits(MODELS[model], card, cards)
            if not fits(share.peak_mib, card.gigabytes):
                short = f"does not fit: {share.peak_mib / 1024:.0f} GiB"
                rows.append([model, "any", short, *[""] * 7])
                break
            found = seconds(card, cards, share, config, shape)
            launches = share.counts.rounds * (shape.layers * in_layer + besides) * LAUNCH
            step = sum(found.values()) + max(0.0, launches - found["roll-out"])
            one = one or step
            cells = [model, str(cards), str(share.counts.prompts_at_once), _s(launches)]
            cells += [_s(found[phase]) for phase in PHASES]
            rows.append([*cells, f"**{_s(step)}**", f"{one / (cards * step):.0%}"])
    return rows


PHASES = ("roll-out", "update", "exchange", "evaluation")


def sharded_table() -> list[list[str]]:
    """All weights of the 7B model under FSDP2: what each card stores and receives per step."""
    card, flags = CARDS["H100 SXM"], MODELS["7B"]
    rows = [["cards", "GB stored", "GB received per micro-batch", "seconds per step", "update"]]
    for cards in (8, 64):
        share, config, shape = plan(flags, cards, 1)
        size, part = share.trained, (cards - 1) / cards
        # weights gathered for the forward and the backward pass, gradients scattered
        received = (2 * LOW + FLOAT) * size * part
        link = card.inside if cards <= card.per_machine else card.between / card.per_machine
        took = share.counts.micro_batches * received / link
        update = seconds(card, cards, share, config, shape)["update"]
        stored = 4 * FLOAT * size / cards
        cells = (f"{stored / 1e9:.0f}", f"{received / 1e9:.0f}", _s(took), _s(update))
        rows.append([str(cards), *cells])
    return rows


def checked_table() -> list[list[str]]:
    """What was measured on two processes, beside half of what one process took."""
    one, two = json.loads(MEASURED.read_text())["rows"]
    rows = [["", "1 process", "a half of it", "2 processes", "measured / a half"]]
    for name in ("rollout", "update", "s/step"):
        half = one[name] / 2
        cells = (one[name], half, two[name])
        rows.append([name, *(f"{x:.2f}" for x in cells), f"{two[name] / half:.2f}"])
    return rows


def _s(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    **{name: lambda name=name: step_table(name) for name in CARDS},
    "FSDP2": sharded_table,
    "two processes": checked_table,
}


def table(name: str) -> str:
    heading, *rows = TABLES[name]()
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """docs/scaling.md with the tables of today."""
    text = PAGE.read_text(encoding="utf-8")
    return MARK.sub(lambda found: found[1] + table(found[2]), text)


def shares(steps: int = 6) -> str:
    """The larger half of a batch of the default job, relative to the mean of both halves."""
    halves = slice(0, 8), slice(8, 16)
    update, decoded, rounds = list[float](), list[float](), list[float]()
    with TemporaryDirectory() as folder:
        trainer = Trainer(Config.of(out_dir=str(Path(folder, "run")), device="cpu"), quiet=True)
        source = trainer.source
        for step in range(steps):
            examples, counts = source.examples.take(step), []
            for part in (slice(0, 16), *halves):
                trainer.sampler.work.clear()
                sampled = list(source.sample(examples[part], step))
                packing = PACKINGS[trainer.config.speed.packing](Completions.join(sampled))
                work = trainer.sampler.work
                counts.append((len(packing.tokens.ids), work["tokens"], work["rounds"]))
            _, *two = counts
            update.append(max(x[0] for x in two) / mean(x[0] for x in two))
            decoded.append(max(x[1] for x in two) / mean(x[1] for x in two))
            rounds.append(max(x[2] for x in two) / counts[0][2])
        trainer.scorer.close()
        trainer.run_dir.close()
    return (
        f"the larger half over their mean: {mean(update):.2f} in tokens of the update, "
        f"{mean(decoded):.2f} of the roll-out; {mean(rounds):.2f} times the whole batch's rounds"
    )


if __name__ == "__main__" and sys.argv[1:] == ["shares"]:
    print(shares())
elif __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

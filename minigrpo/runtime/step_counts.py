"""Count what one step runs: tokens, decoding rounds, predictions, keys that attention gathers.

Two ways to know them: `nothing_shared` takes the lengths of prompts and answers, and assumes that
all completions differ and that no proposed token is accepted. `as_sampled` takes completions that
the model has sampled for a few prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..config import Config
from ..model.packed_attention import Packing, SharedPrefixPacking
from ..model.packing import PACKINGS
from ..types import Completions

MOST_PROMPTS, MOST_TOKENS = 16, 512  # of made-up completions; tokens per prompt


@dataclass(frozen=True)
class StepCounts:
    """One process's share of a step. Tokens are sums over the share unless they are lengths."""

    prompts: int
    samples: int  # per prompt
    micro: int  # prompts per micro-batch
    prompt_len: float  # mean
    completion_len: float  # mean
    packed: float  # tokens that one forward of the update runs
    padded: float  # places of padded rows, in which attention runs them
    causal: float  # of these, places in rows that attend within themselves
    gathered: float  # keys that attention gathers for completions; 0 if prompts are repeated
    masked: float  # pairs of a query and a gathered key
    merged: float  # keys that attention gathers if it merges parts, those of prompts included
    merged_masked: float  # pairs of a query and one of these keys, where a mask is needed
    predictions: float  # tokens that go through the output head in the update
    rounds: float  # of decoding, after the prompts; 0 if nothing is sampled
    decoded: float  # tokens that the model runs in those rounds
    window: float  # tokens per slot and round, a mean
    slots: float  # sequences that the KV cache has room for, if all prompts are decoded together
    prompts_at_once: int  # per rollout batch

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    @property
    def prompt_tokens(self) -> float:
        return self.prompts * self.prompt_len

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens by phase: those that one forward of the phase runs."""
        tokens = {"update": self.packed}
        return tokens | ({"rollout": self.prompt_tokens + self.decoded} if self.slots else {})

    @property
    def micro_batches(self) -> int:
        return -(-self.prompts // self.micro)

    @property
    def rollout_batches(self) -> int:
        return -(-self.prompts // self.prompts_at_once)


def nothing_shared(
    config: Config, *, prompt_len: float, completion_len: float, longest: float, world_size: int = 1
) -> StepCounts:
    """Counts if completions have these lengths in tokens, share nothing, and differ from drafts."""
    prompts = config.sampling.prompts_per_step // world_size
    samples = 1 if config.supervised else config.sampling.group_size
    at_once = min(config.memory.rollout_batch_size or prompts, prompts)
    completions = prompts * samples
    once = config.speed.packing != "repeated"
    # a completion's last token is not run: nothing follows it
    packed = prompts * prompt_len * (1 if once else samples) + completions * (completion_len - 1)
    rounds = decoded = 0.0
    if not config.supervised:
        rounds = (longest - 1) * (prompts / at_once)
        decoded = completions * (completion_len - 1)
    return StepCounts(
        prompts=prompts,
        samples=samples,
        micro=min(config.memory.micro_batch_size or prompts, prompts),
        prompt_len=prompt_len,
        completion_len=completion_len,
        packed=packed,
        padded=packed,
        causal=prompts * prompt_len if once else packed,
        gathered=completions * (prompt_len + completion_len) if once else 0.0,
        masked=completions * completion_len * (prompt_len + completion_len) if once else 0.0,
        merged=prompts * prompt_len * 2 + completions * completion_len if once else packed,
        merged_masked=completions * completion_len**2 if once else 0.0,
        predictions=completions * completion_len,
        rounds=rounds,
        decoded=decoded,
        window=1,
        slots=0.0 if config.supervised else float(completions),
        prompts_at_once=at_once,
    )


def as_sampled(
    worst: StepCounts,
    config: Config,
    completions: Completions,
    work: Mapping[str, float] | None = None,
) -> StepCounts:
    """Counts of the whole share, from the completions of a few of its prompts.

    `work` is what `generate` counted for them; None for true answers. Sums grow with the prompts;
    the rounds of a rollout batch do not, because its completions run side by side.
    """
    sampled = len(completions)
    scale = worst.prompts / sampled
    packed = packed_counts(PACKINGS[config.speed.packing](completions))
    length = float(completions.completion_mask.sum(-1).float().mean())
    counts = replace(
        worst,
        prompt_len=float(completions.prompt_len.float().mean()),
        completion_len=length,
        packed=packed["packed"] * scale,
        padded=packed["padded"] * scale,
        causal=packed["causal"] * scale,
        gathered=packed["gathered"] * scale,
        masked=packed["masked"] * scale,
        merged=packed["merged"] * scale,
        merged_masked=packed["merged_masked"] * scale,
        predictions=packed["predictions"] * scale,
    )
    if work is None:
        return counts
    batches = worst.rollout_batches / -(-sampled // min(worst.prompts_at_once, sampled))
    counts = replace(
        counts,
        rounds=work["rounds"] * batches,
        decoded=(work["tokens"] - float(completions.prompt_len.sum())) * scale,
    )
    if not config.speed.speculative_decoding:
        return counts
    decoded = work["tokens"] - float(completions.prompt_len.sum())
    counts = replace(counts, window=max(1.0, decoded / max(1, work["slot_rounds"])))
    # slots separate when their completions do, and the cache grows by doubling
    slots = worst.prompts
    while slots < distinct_completions(completions) * scale:
        slots *= 2
    return replace(counts, slots=min(slots, worst.slots))


def packed_counts(packing: Packing) -> dict[str, float]:
    """What one forward over a packing runs and gathers, by the names of StepCounts."""
    causal = packing.causal_rows.numel()
    rows = packing.completion_attention if isinstance(packing, SharedPrefixPacking) else ()
    return {
        "packed": len(packing.tokens.ids),
        "padded": causal + sum(part.query_rows.numel() for part in rows),
        "causal": causal,
        "gathered": sum(part.key_rows.numel() for part in rows),
        "masked": sum(part.visible.numel() for part in rows),
        "merged": sum(part.key_rows.numel() for part in packing.parts),
        "merged_masked": sum(
            part.visible.numel() for part in packing.parts if part.visible is not None
        ),
        "predictions": len(packing.targets),
    }


def distinct_completions(completions: Completions) -> int:
    """How many completions differ from all others of their group."""
    ids, mask = completions.completion_ids, completions.completion_mask
    return sum(len(group.unique(dim=0)) for group in ids.masked_fill(~mask, -1))


def made_up_completions(counts: StepCounts, vocab_size: int) -> Completions:
    """Random completions of a step's lengths, which share nothing; a few prompts of them."""
    prompt_len, length = max(1, round(counts.prompt_len)), max(1, round(counts.completion_len))
    prompts = min(counts.prompts, MOST_PROMPTS)
    samples = min(counts.samples, max(1, MOST_TOKENS // length))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (prompts, samples, length), generator=draw)
    ids[..., 0] = torch.arange(samples) % vocab_size
    return Completions(
        prompt_ids=torch.zeros(prompts, prompt_len, dtype=torch.int64),
        prompt_len=torch.full((prompts,), prompt_len),
        completion_ids=ids,
        completion_mask=torch.ones_like(ids, dtype=torch.bool),
    )

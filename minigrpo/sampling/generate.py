"""Batched sampling: `generate` and its loop.

A token is a pure function of its logits and of one uniform number that was drawn beforehand. So a
completion depends neither on what else is in the batch nor on when other completions finish. And
speculative decoding is exact: a proposed token is kept only if it would have been picked anyway.

The model runs in decoders.py, running.py keeps the state of the completions, params.py picks
tokens, and sampler.py turns examples into calls of `generate`.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import ParamSpec

import torch
from torch import Tensor

from ..model.transformer import Transformer
from ..types import Completions
from .decoders import Decoder, ReplicatedPrefixDecoder
from .params import SamplingParams, check_uniforms
from .running import RunningSequences

__all__ = ["SamplingParams", "generate", "generate_parts"]

P = ParamSpec("P")
# How often the host checks which sequences have finished, unless it must check in every round. Each
# check waits for the device; without checks, finished sequences waste rounds.
ROUNDS_BETWEEN_CHECKS = 4
# Waiting prompts enter when there is room for this share of the prompts that are decoded together.
# An entry costs a forward pass of its own, and a copy of what has been sampled.
SHARE_THAT_ENTERS = 0.125
DEFAULT_PARAMS = SamplingParams()


@torch.no_grad()
def generate_parts(
    model: Transformer,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    *,
    stops: Collection[int],
    max_new_tokens: int,
    num_samples: int = 1,
    prompts_at_once: int = 0,
    u: Tensor | None = None,
    params: SamplingParams = DEFAULT_PARAMS,
    decoder: Callable[[Transformer, int], Decoder] = ReplicatedPrefixDecoder,
    drafts: Tensor | None = None,
    num_speculative_tokens: int = 7,
    work: Counter[str] | None = None,
    watch: Callable[[Tensor, Tensor], object] | None = None,
) -> Iterator[Completions]:
    """Complete each prompt `num_samples` times; yield the prompts in order, in parts.

    A round runs W = 1 + `num_speculative_tokens` tokens per slot: the last token, and proposals
    read off the draft. It keeps the picks up to and including the first that differs from its
    proposal. Without drafts, W is 1.

    With `prompts_at_once`, waiting prompts enter as completions end and make room (continuous
    batching, as in Orca, Yu et al., OSDI 2022). A prompt enters with all of its completions. A
    prompt that has finished is kept until those before it have, so the parts are the same as if
    one batch were decoded after the other.

    Args:
        prompt_ids: `[P, Lp]` int64, right-padded, on any device.
        prompt_len: `[P]` int64.
        stops: the tokens that end a completion.
        prompts_at_once: prompts per part, 0: all. There are never more completions side by side
            than those of so many prompts. It changes no token.
        u: `[P, G, S]` uniform numbers in [0, 1), S >= max_new_tokens; None picks the most likely
            token each time.
        params: temperature, top-k, top-p and min-p.
        decoder: how the model is run: with or without a cache.
        drafts: `[P, L]` int64, a text that completions of each prompt probably resemble, such as
            the known answer. Drafts change the number of rounds, not the tokens.
        work: a counter to add to: `rounds` after the prompts; `tokens` that the model ran; `rows`,
            the number of completions; `row_rounds`, the sum over completions of the rounds until
            each was found to be finished; `slot_rounds`, likewise over slots.
        watch: called with `ids [R, S]` and `lengths [R]` of the sequences of all prompts that have
            entered and were not yielded, after each round, on the model's device.

    Yields:
        Completions on the model's device with G = num_samples and S the longest completion. A
        completion ends with a stop token, or after max_new_tokens without one.

    Raises ValueError for `u` of another shape or, on the host, with other numbers.
    """
    device, total = model.device, len(prompt_ids)
    if u is not None:
        check_uniforms(u, total, num_samples, max_new_tokens)
    size = min(prompts_at_once or total, total)
    enough = max(1, int(size * SHARE_THAT_ENTERS))

    def start(prompts: slice) -> RunningSequences:
        return RunningSequences(
            len(prompt_ids[prompts]),
            num_samples,
            max_new_tokens=max_new_tokens,
            stops=stops,
            params=params,
            u=None if u is None else u[prompts].to(device),
            drafts=None if drafts is None else drafts[prompts].to(device),
            num_speculative_tokens=num_speculative_tokens,
            device=device,
        )

    sequences = start(slice(0))
    slots = decoder(model, sequences.width)
    entered = taken = tokens_run = 0
    for turn in itertools.count(1):
        room = size - -(-len(sequences.running) // num_samples)
        waiting = total - entered
        if entering := waiting > 0 and room >= min(enough, waiting):
            prompts = slice(entered, entered + min(room, waiting))
            entered = prompts.stop
            if not sequences.num_slots:  # a new decoder, so that the memory of the last is freed
                tokens_run += slots.tokens_run
                slots = decoder(model, sequences.width)
            new = start(prompts)
            ids, lengths = prompt_ids[prompts].to(device), prompt_len[prompts].to(device)
            new.accept(slots.prefill(ids, lengths, new.num_slots // len(ids))[:, None])
            sequences.join(new)
        else:
            sequences.accept(slots.step(*sequences.next_inputs()))
        if watch:
            watch(sequences.ids, sequences.lengths)
        due = turn % ROUNDS_BETWEEN_CHECKS == 0 or sequences.length_bound >= max_new_tokens
        if sequences.may_have_diverged or due or entering:  # the first proposals tell most
            sequences.update_slots(slots)
        while taken < total and sequences.num_finished >= min(size, total - taken):
            prompts = slice(taken, min(taken + size, total))
            taken = prompts.stop
            if taken == total and work is not None:  # now, because nobody asks after the last part
                tokens_run += slots.tokens_run
                work.update(rounds=sequences.rounds, tokens=tokens_run, rows=total * num_samples)
                summed = sequences.sequence_rounds, sequences.slot_rounds
                work.update(row_rounds=summed[0], slot_rounds=summed[1])
            yield sequences.take(prompt_ids[prompts].to(device), prompt_len[prompts].to(device))
        if taken == total:
            return


def _whole(parts: Callable[P, Iterator[Completions]]) -> Callable[P, Completions]:
    """The same function, which joins its parts."""

    @functools.wraps(parts)
    def join(*args: P.args, **options: P.kwargs) -> Completions:
        return Completions.join(list(parts(*args, **options)))

    return join


# `generate_parts` in one piece: it returns the completions of all prompts
generate = _whole(generate_parts)

"""Batched sampling: `generate` and its loop.

A token is a pure function of its logits and of one uniform number that was drawn beforehand. So a
completion depends neither on what else is in the batch nor on when other completions finish. And
speculative decoding is exact: a proposed token is kept only if it would have been picked anyway.

The model runs in decoders.py, running.py keeps the state of the completions, params.py picks
tokens, and sampler.py turns examples into calls of `generate`.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ..model.transformer import Transformer
from ..types import Completions
from .decoders import Decoder, ReplicatedPrefixDecoder
from .params import SamplingParams
from .running import RunningSequences

__all__ = ["SamplingParams", "generate"]

# How often the host checks which sequences have finished, unless it must check in every round. Each
# check waits for the device; without checks, finished sequences waste rounds.
ROUNDS_BETWEEN_CHECKS = 4
DEFAULT_PARAMS = SamplingParams()


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    *,
    eos: int,
    max_new_tokens: int,
    num_samples: int = 1,
    u: Tensor | None = None,
    params: SamplingParams = DEFAULT_PARAMS,
    decoder: Callable[..., Decoder] = ReplicatedPrefixDecoder,
    drafts: Tensor | None = None,
    num_speculative_tokens: int = 7,
    work: Counter[str] | None = None,
    watch: Callable[[Tensor, Tensor], object] | None = None,
) -> Completions:
    """Complete each prompt `num_samples` times.

    A round runs W = 1 + `num_speculative_tokens` tokens per slot: the last token, and proposals
    read off the draft. It keeps the picks up to and including the first that differs from its
    proposal. Without drafts, W is 1.

    Args:
        prompt_ids: `[P, Lp]` int64, right-padded, on the model's device.
        prompt_len: `[P]` int64.
        eos: the token that ends a completion.
        u: `[P, G, S]` uniform numbers in [0, 1), S >= max_new_tokens; None picks the most likely
            token each time.
        params: temperature, top-k, top-p and min-p.
        decoder: how the model is run: with or without a cache.
        drafts: `[P, L]` int64, a text that completions of each prompt probably resemble, such as
            the known answer. Drafts change the number of rounds, not the tokens.
        work: a counter to add to: `rounds` after the prompts; `tokens` that the model ran; `rows`,
            the number of completions; `row_rounds`, the sum over completions of the rounds until
            each was found to be finished.
        watch: called after each round with the tokens so far, `[R, S]`, and how many of them each
            of the R = P * G completions has, `[R]`, both on the model's device.

    Returns:
        Completions on the model's device with G = num_samples and S the longest completion. A
        completion ends with EOS, or after max_new_tokens without one.
    """
    num_prompts, capacity = len(prompt_ids), max_new_tokens + num_speculative_tokens + 1
    sequences = RunningSequences(
        num_prompts,
        num_samples,
        max_new_tokens=max_new_tokens,
        eos=eos,
        params=params,
        u=u,
        drafts=drafts,
        num_speculative_tokens=num_speculative_tokens,
        device=prompt_ids.device,
    )
    slots_per_prompt = len(sequences.representatives) // num_prompts
    slots = decoder(model, prompt_ids, prompt_len, slots_per_prompt, capacity)
    logits = slots.prefill()[:, None]
    for turn in itertools.count(1):
        sequences.accept(logits)
        if watch is not None:
            watch(sequences.ids, sequences.lengths)
        due = turn % ROUNDS_BETWEEN_CHECKS == 0 or sequences.length_bound >= max_new_tokens
        if (sequences.may_have_diverged or due) and not sequences.update_slots(slots):
            break
        tokens, columns = sequences.next_inputs()
        num_columns = min(sequences.length_bound - 1 + sequences.window, capacity)
        logits = slots.step(tokens, columns, num_columns)

    if work is not None:
        rows = {"row_rounds": sequences.sequence_rounds, "rows": num_prompts * num_samples}
        work.update(rounds=turn - 1, tokens=slots.tokens_run, **rows)
    return sequences.to_completions(prompt_ids, prompt_len)

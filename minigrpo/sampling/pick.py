"""How the next token is picked: top-k, top-p, min-p, one uniform number; and what is proposed.

A proposal is read off a draft, a text such as the known answer, as in prompt-lookup decoding: it
needs no smaller model (Leviathan et al., arXiv 2211.17192). It is accepted only if sampling picks
the same: a draft changes the number of rounds, never the tokens.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..settings import SamplingConfig

NUM_MATCHED = 3  # K, the number of last tokens that locate a sequence in its draft


def truncate(logp: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities `[..., V]` with -inf for every token that is removed.

    First top-k, then top-p (nucleus sampling, arXiv 1904.09751) of what top-k kept, then min-p
    (arXiv 2407.01082), in the order of transformers. Tokens that tie with the last kept one are
    kept too. The log-sum-exp of the result is the log of the kept mass.
    """
    vocab_size = logp.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        kept = logp.topk(sampling.top_k).values
        least = kept[..., -1:]
        logp = logp.masked_fill(logp < least, -torch.inf)
    if sampling.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = ordered.softmax(-1).cumsum(-1)
        # The last token that is kept is the first one at which the mass reaches top_p.
        num_before = (mass < sampling.top_p).sum(-1, keepdim=True)
        least = ordered.gather(-1, num_before.clamp(max=vocab_size - 1))
        logp = logp.masked_fill(logp < least, -torch.inf)
    if sampling.min_p > 0:
        least = logp.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logp = logp.masked_fill(logp < least, -torch.inf)
    return logp


def pick_token(logp: Tensor, uniforms: Tensor | None, slot: Tensor) -> Tensor:
    """Sample by inverse CDF, or take the most likely token if `uniforms` is None.

    Log-probs `[B, W, V]` of B slots at W positions, which need not be normalised, numbers
    `uniforms` `[N, W]` in [0, 1) and the slot of each sequence `[N]` -> tokens `[N, W]`.
    """
    if uniforms is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # Scaled by the total, because with truncation and rounding the CDF does not end in exactly 1.
    targets = uniforms[..., None].to(cdf.dtype) * cdf[..., -1:]
    picked = torch.searchsorted(cdf, targets, right=True)[..., 0]
    # Clamped, because logits that are not finite would pick a token past the vocabulary.
    return picked.clamp_(max=logp.shape[-1] - 1)


def propose(drafts: Tensor, ids: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Propose the tokens that come next in each draft.

    A sequence is located in its draft by its last K tokens, at the first of the matches that are
    nearest to its own length. If they match nowhere, the draft is read from that length on.

    `drafts` `[B, L]` int64, `ids` `[B, S]`, the tokens of each sequence, and their number `lengths`
    `[B]` -> `[B, num_tokens]`. Past the last column, that column is repeated.
    """
    missing = NUM_MATCHED + 1 - drafts.shape[1]
    drafts = pad(drafts, (0, max(0, missing)))
    lengths = lengths[:, None]
    last_columns = lengths + torch.arange(-NUM_MATCHED, 0, device=ids.device)
    recent = ids.gather(1, last_columns.clamp(min=0))  # [B, K]

    # 1. A draft matches at column c if its tokens c - K .. c - 1 are the recent ones.
    columns = torch.arange(NUM_MATCHED, drafts.shape[1], device=ids.device)
    pieces = drafts.unfold(1, NUM_MATCHED, 1)[:, :-1]  # [B, L - K, K]
    is_match = (pieces == recent[:, None]).all(-1)
    is_match &= lengths >= NUM_MATCHED  # else there are fewer than K recent tokens

    # 2. Take the nearest match, and read on from there.
    distance = (columns - lengths).abs().masked_fill(~is_match, 1 << 30)
    nearest = columns[distance.argmin(1, keepdim=True)]
    start = torch.where(is_match.any(1, keepdim=True), nearest, lengths)
    next_columns = start + torch.arange(num_tokens, device=ids.device)
    return drafts.gather(1, next_columns.clamp(max=drafts.shape[1] - 1))

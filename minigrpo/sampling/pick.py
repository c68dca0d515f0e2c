"""How the next token is picked: top-k, top-p, min-p, one uniform number; and what is proposed.

A proposal is read off a draft, a text such as the known answer, as in prompt-lookup decoding: it
needs no smaller model (Leviathan et al., arXiv 2211.17192). It is accepted only if sampling picks
the same. So a draft changes the number of rounds, never the tokens.
"""

import math

import torch
from torch import Tensor

from ..config import SamplingConfig

NUM_MATCHED = 3  # K, the last tokens of a sequence, which locate it in its draft


def truncate(logp: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities `[..., V]` with -inf for every token that is removed.

    First top-k, then top-p (nucleus sampling, arXiv 1904.09751) of what top-k kept, then min-p
    (arXiv 2407.01082), in the order of transformers. Tokens that tie with the last kept one are
    kept too. The result is not renormalised: its log-sum-exp is the log of the kept mass.
    """
    if sampling.top_k and sampling.top_k < logp.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = ordered.softmax(-1).cumsum(-1)
        # the first token at which the mass reaches top_p is the last one kept
        last = (mass < sampling.top_p).sum(-1, keepdim=True).clamp(max=logp.shape[-1] - 1)
        logp = logp.masked_fill(logp < ordered.gather(-1, last), -torch.inf)
    if sampling.min_p > 0:
        least = logp.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logp = logp.masked_fill(logp < least, -torch.inf)
    return logp


def pick_token(logp: Tensor, u: Tensor | None, slot: Tensor) -> Tensor:
    """Sample by inverse CDF, or take the most likely token if `u` is None.

    Log-probs `[B, W, V]` of B slots at W positions, which need not be normalised, numbers `u`
    `[N, W]` in [0, 1) and the slot of each sequence `[N]` -> tokens `[N, W]`.
    """
    if u is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # Scale u by the total, because with truncation and rounding the CDF does not end in exactly 1.
    # Clamp, because logits that are not finite would pick a token past the vocabulary.
    picked = torch.searchsorted(cdf, u[..., None].to(cdf.dtype) * cdf[..., -1:], right=True)[..., 0]
    return picked.clamp_(max=logp.shape[-1] - 1)


def propose(drafts: Tensor, ids: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Propose the tokens that come next in each draft.

    Each sequence is located in its draft by its last K tokens. If they match in several places,
    the nearest to the sequence's own length is taken; of two equally near ones, the first. If they
    match nowhere, the draft is read from the sequence's own length on.

    `drafts` `[B, L]` int64, `ids` `[B, S]`, the tokens of each sequence, and their number `lengths`
    `[B]` -> `[B, num_tokens]`. Past the last column, that column is repeated.
    """
    drafts = torch.nn.functional.pad(drafts, (0, max(0, NUM_MATCHED + 1 - drafts.shape[1])))
    back = torch.arange(-NUM_MATCHED, 0, device=ids.device)
    recent = ids.gather(1, (lengths[:, None] + back).clamp(min=0))  # [B, K]
    # place a of a draft is a match if its tokens a-K .. a-1 equal the recent ones
    places = torch.arange(NUM_MATCHED, drafts.shape[1], device=ids.device)
    equal = (drafts.unfold(1, NUM_MATCHED, 1)[:, :-1] == recent[:, None]).all(-1)
    matches = equal & (lengths >= NUM_MATCHED)[:, None]  # else `recent` is partly filler
    distance = (places - lengths[:, None]).abs().masked_fill(~matches, 1 << 30)
    start = torch.where(matches.any(1), places[distance.argmin(1)], lengths)
    following = start[:, None] + torch.arange(num_tokens, device=ids.device)
    return drafts.gather(1, following.clamp(max=drafts.shape[1] - 1))

"""How the next token is picked: temperature, top-k, top-p, min-p, one uniform number per token."""

import math

import torch
from torch import Tensor

from ..config import SamplingConfig


def truncate(logp: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities `[..., V]` with -inf for every token that is removed.

    First top-k, then top-p (nucleus sampling, Holtzman et al., arXiv 1904.09751) of what top-k
    kept, then min-p (Nguyen et al., arXiv 2407.01082), in the order of transformers. Tokens that
    tie with the last kept token are kept too. The result is not renormalised: its log-sum-exp is
    the log of the kept mass.
    """
    if sampling.top_k and sampling.top_k < logp.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = (ordered - ordered.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        # the first token at which the mass reaches top_p is the last one kept
        last = (mass < sampling.top_p).sum(-1, keepdim=True).clamp(max=logp.shape[-1] - 1)
        logp = logp.masked_fill(logp < ordered.gather(-1, last), -torch.inf)
    if sampling.min_p > 0:
        least = logp.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logp = logp.masked_fill(logp < least, -torch.inf)
    return logp


def pick_token(logp: Tensor, u: Tensor | None, slot: Tensor) -> Tensor:
    """Sample by inverse CDF, or take the most likely token if `u` is None.

    Args:
        logp: `[B, W, V]`, log-probabilities of B slots at W positions; they need not be normalised.
        u: `[N, W]`, uniform numbers in [0, 1) of N sequences.
        slot: `[N]` int64, the slot of each sequence; several may share one.

    Returns:
        `[N, W]` int64, the tokens.
    """
    if u is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # Scale u by the total, because with truncation and rounding the CDF does not end in exactly 1.
    # Clamp, because logits that are not finite would pick a token past the vocabulary.
    picked = torch.searchsorted(cdf, u[..., None].to(cdf.dtype) * cdf[..., -1:], right=True)[..., 0]
    return picked.clamp_(max=logp.shape[-1] - 1)

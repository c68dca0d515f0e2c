"""How the next token is picked: temperature, top-k, top-p, min-p, one uniform number per token."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..config import SamplingConfig


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from. The defaults are the model's own softmax."""

    temperature: float = 1.0  # logits are divided by it
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    # keep the fewest most likely tokens whose probabilities reach top_p; 1 keeps all
    top_p: float = 1.0
    # keep the tokens whose probability is at least min_p times the largest; 0 keeps all
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that its flag would refuse."""
        SamplingConfig(**vars(self))

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Self:
        """The distribution of --temperature, --top-k, --top-p and --min-p."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def truncate(logp: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p to what top-k kept, then min-p.

    Top-p is nucleus sampling (Holtzman et al., arXiv 1904.09751). Min-p keeps the tokens whose
    probability is at least `min_p` times the largest one (Nguyen et al., arXiv 2407.01082). Tokens
    that tie with the last kept token are kept too.

    This is the order in which transformers applies them. vLLM applies min-p first, which differs
    only together with top-p: the mass that top-p counts is then that of the tokens min-p kept.

    Args:
        logp: `[..., V]`, log-probabilities at the sampling temperature.

    Returns:
        `[..., V]`, the same with -inf for every token that is removed. It is not renormalised: the
        log-sum-exp of the result is the log of the kept mass.
    """
    if params.top_k and params.top_k < logp.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(params.top_k).values[..., -1:], -torch.inf)
    if params.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = (ordered - ordered.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        # the first token at which the mass reaches top_p is the last one kept
        last = (mass < params.top_p).sum(-1, keepdim=True).clamp(max=logp.shape[-1] - 1)
        logp = logp.masked_fill(logp < ordered.gather(-1, last), -torch.inf)
    if params.min_p > 0:
        least = logp.amax(-1, keepdim=True) + math.log(params.min_p)
        logp = logp.masked_fill(logp < least, -torch.inf)
    return logp


def check_uniforms(u: Tensor, prompts: int, num_samples: int, longest: int) -> None:
    """Raise ValueError unless `u` is `[P, G, S]`, S >= longest, of numbers in [0, 1).

    The values are looked at on the host alone, because a check would wait for a GPU.
    """
    if u.dim() != 3 or u.shape[:2] != (prompts, num_samples) or u.shape[2] < longest:
        raise ValueError(
            f"u must have the shape [{prompts}, {num_samples}, S] with S at least {longest}, "
            f"got {list(u.shape)}"
        )
    if u.device.type == "cpu" and u.numel():
        low, high = (x.item() for x in u.aminmax())  # NaN if there is one
        if not (low >= 0 and high < 1):
            raise ValueError(f"u must be numbers in [0, 1), got {low:g} to {high:g}")


def pick_token(logp: Tensor, u: Tensor | None, slot: Tensor) -> Tensor:
    """Sample by inverse CDF, or take the most likely token if `u` is None.

    Several sequences may share a slot, and thus a distribution, but each has its own `u`.

    Args:
        logp: `[B, W, V]`, log-probabilities of B slots at W positions; they need not be normalised.
        u: `[R, W]`, uniform numbers in [0, 1) of R sequences.
        slot: `[R]` int64, the slot of each sequence.

    Returns:
        `[R, W]` int64, the tokens.
    """
    if u is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # Scale u by the total, because with truncation and rounding the CDF does not end in exactly 1.
    # Clamp, because a product that rounds up to the total would be past the vocabulary.
    picked = torch.searchsorted(cdf, u[..., None].to(cdf.dtype) * cdf[..., -1:], right=True)[..., 0]
    return picked.clamp_(max=logp.shape[-1] - 1)

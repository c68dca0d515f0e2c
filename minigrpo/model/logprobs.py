"""From hidden states to log-probabilities: output head, temperature, log-softmax, gather.

The log-softmax is computed in float32 or wider, whatever the model's precision. In bfloat16 its
error is 2e-3 to 3e-3, enough to matter for the ratio that a policy loss clips.

The logits of M tokens are M * V floats, and autograd would keep several copies of them. So they are
computed in chunks, and again in the backward pass: at most two chunks exist. torch's checkpoint
around each chunk was measured to save no memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import linear

Other = tuple[Tensor, Tensor]  # the [M, D] hidden states and the [V, D] head of another model

# Most logits in memory at once. On a CPU they should fit in its cache.
MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26, "mps": 1 << 26}  # 16 and 256 MiB of float32
# Fewest tokens per chunk: each chunk reads the whole output head and updates its whole gradient.
SMALLEST_CHUNK = 128


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of `logits / temperature` over the last dimension, in float32 or wider.

    `temperature` must be greater than 0.
    """
    return F.log_softmax(at_least_fp32(logits) / temperature, dim=-1)


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    learn_entropy: bool,
    other: Other | None,
) -> tuple[Tensor, ...]:
    """Log-probabilities of the next tokens, and the entropies of their distributions, in nats.

    Args:
        hidden: `[M, D]`, final hidden states.
        head: `[V, D]`, the weights of the output head.
        targets: `[M]` int64, the next tokens.
        learn_entropy: whether the entropy has a gradient; otherwise it is only a metric.
        other: a model without gradient. Then `learn_entropy` must be true.

    Returns:
        `[M]` and `[M]`, float32 or wider; with `other` also KL(this model || other), `[M]`.
    """
    kind = hidden.device.type
    chunk = max(SMALLEST_CHUNK, MAX_LOGITS[kind] // len(head))
    # autocast does not apply in a custom backward
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    settings = temperature, chunk, learn_entropy
    other = other and (other[0].to(low), other[1].to(low))
    return _Chunked.apply(hidden.to(low), head.to(low), targets, settings, other)


class _Chunked(torch.autograd.Function):
    """`token_logprobs` chunk by chunk; the backward pass computes the logits again.

    logp = log_softmax(hidden @ head.T / temperature)[target]
    d logp / d (hidden @ head.T) = (one-hot - softmax) / temperature
    d sum(softmax u) / d (hidden @ head.T) = softmax (u - sum(softmax u)) / temperature
        with u = -log-softmax for the entropy, log-softmax - log q for the KL
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        settings: tuple[float, int, bool],
        other: Other | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, head, targets)
        ctx.settings = temperature, chunk, learn_entropy = settings
        ctx.other = other
        logp, entropy, kl = at_least_fp32(hidden.new_empty(3, len(hidden)))
        for part, logits in _logits_in_chunks(hidden, head, temperature, chunk):
            logps = logits.log_softmax(-1)
            logp[part] = logps.gather(-1, targets[part, None])[:, 0]
            if other:
                log_q = log_softmax(linear(other[0][part], other[1]), temperature)
                kl[part] = (logps.exp() * (logps - log_q)).sum(-1)
            entropy[part] = -torch.exp(logps, out=logits).mul_(logps).sum(-1)
            del logits, logps  # before the next chunk's exist
        if not learn_entropy:
            ctx.mark_non_differentiable(entropy)
        return (logp, entropy, kl) if other else (logp, entropy)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropy: Tensor, grad_kl: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        hidden, head, targets = ctx.saved_tensors
        temperature, chunk, learn_entropy = ctx.settings
        learns = ctx.needs_input_grad[1]  # a head is frozen under adapters
        grad_head = torch.zeros_like(head if learns else head[:0], dtype=grad.dtype)
        grad_hidden = torch.empty_like(hidden)
        for part, logits in _logits_in_chunks(hidden, head, temperature, chunk):
            slope = logits.softmax(-1).neg_()
            slope.scatter_add_(-1, targets[part, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grad[part, None] / temperature)
            if learn_entropy:
                logps = logits.log_softmax(-1)
                probs, u = torch.exp(logps, out=logits), logps * -grad_entropy[part, None]
                if grad_kl is not None:
                    log_q = log_softmax(linear(ctx.other[0][part], ctx.other[1]), temperature)
                    u += grad_kl[part, None] * (logps - log_q)
                u -= (probs * u).sum(-1, keepdim=True)
                slope.addcmul_(probs, u, value=1 / temperature)
            low = slope.to(hidden.dtype)
            grad_hidden[part] = low @ head
            if learns and (hidden.is_cpu or low is slope):
                # in place: no second [V, D], which a CPU would convert from bfloat16 slowly
                grad_head.addmm_(slope.t(), hidden[part].to(slope))
            elif learns:
                grad_head += low.t() @ hidden[part]
            del logits, slope, low  # before the next chunk's exist
        return grad_hidden, grad_head.to(head) if learns else None, None, None, None


def _logits_in_chunks(
    hidden: Tensor, head: Tensor, temperature: float, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Which tokens, and their logits."""
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        yield part, at_least_fp32(linear(hidden[part], head)).div_(temperature)

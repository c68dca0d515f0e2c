"""From hidden states to log-probabilities: output head, temperature, log-softmax, gather.

The log-softmax is computed in float32 or wider. In bfloat16 its error is 2e-3 to 3e-3, enough to
matter for the ratio that a policy loss clips.

The logits of M tokens are M * V floats, and autograd would keep several copies of them. So they are
computed in chunks, and again in the backward pass; torch's checkpoint would save no memory.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from .linear import autocast_dtype, has_float32_products, linear

# Most logits in memory at once. On a CPU they should fit in its cache; a CUDA device with much free
# memory computes up to four times as many.
MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # 16 and 256 MiB of float32
# Fewest tokens per chunk: each chunk reads the whole output head and updates its whole gradient.
SMALLEST_CHUNK = 128
# How a pass treats the entropy of its predictions; if it is learnt, it has a gradient.
Entropy = Literal["none", "measured", "learnt"]


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
    """`[.., D]` and `[V, D]` -> `[.., V]` float32 or wider; the same in sampler and trainer."""
    if not has_float32_products(hidden):
        return at_least_fp32(linear(hidden, head))
    low = hidden.to(autocast_dtype(hidden)).flatten(0, -2)
    logits = torch.mm(low, head.to(low).t(), out_dtype=torch.float32)
    return logits.unflatten(0, hidden.shape[:-1])


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities `[M]` of next tokens, and entropies `[M]` of their distributions, in nats.

    `hidden` is `[M, D]`, `head` `[V, D]`, and `targets` are the next tokens, `[M]` int64.
    """
    low = autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # the entropy needs float32
        return _Chunked.apply(hidden.to(low), head.to(low), targets, temperature, entropy)


class _Chunked(torch.autograd.Function):
    """`token_logprobs` chunk by chunk; the backward pass computes the logits again.

    logp = log_softmax(hidden @ head.T / temperature)[target]
    d logp / d (hidden @ head.T) = (one-hot - softmax) / temperature
    entropy = sum(softmax surprisal) with surprisal = -log-softmax
    d entropy / d (hidden @ head.T) = softmax (surprisal - entropy) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, head, targets)
        ctx.temperature = temperature
        ctx.learns_entropy = entropy == "learnt"
        logp, entropies = at_least_fp32(hidden.new_empty(2, len(hidden)))
        for chunk, logits in _logits_in_chunks(hidden, head, temperature):
            logps = logits.log_softmax(-1)
            of_targets = logps.gather(-1, targets[chunk, None])
            logp[chunk] = of_targets[:, 0]
            if entropy != "none":
                probs = torch.exp(logps, out=logits)
                entropies[chunk] = -torch.einsum("mv,mv->m", probs, logps)  # in one pass
                del probs
            del logits, logps  # frees the memory before the next chunk
        if entropy == "none":
            return logp, None
        if entropy == "measured":
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets = ctx.saved_tensors
        temperature = ctx.temperature
        learns_head = ctx.needs_input_grad[1]  # the head is frozen under adapters
        grad_head = torch.zeros_like(head if learns_head else head[:0], dtype=grad.dtype)
        grad_hidden = torch.empty_like(hidden)
        for chunk, logits in _logits_in_chunks(hidden, head, temperature):
            # 1. The gradient of the chunk's logits, in 16 bits at once where only products read it.
            probs = logits.softmax(-1)
            slope = probs
            if has_float32_products(hidden) and not ctx.learns_entropy:
                slope = torch.empty_like(probs, dtype=hidden.dtype)
            scale = grad[chunk, None] / temperature
            target = targets[chunk, None]
            of_targets = (1 - probs.gather(-1, target)) * scale
            torch.mul(probs, -scale, out=slope)
            slope.scatter_(-1, target, of_targets.to(slope.dtype))
            if ctx.learns_entropy:
                logps = logits.log_softmax(-1)
                probs = torch.exp(logps, out=logits)
                u = logps * -grad_entropy[chunk, None]
                u -= (probs * u).sum(-1, keepdim=True)
                slope.addcmul_(probs, u, value=1 / temperature)

            # 2. The gradients of its hidden states and, in place, of the head: a second [V, D]
            # would take memory, and a CPU converts it from bfloat16 slowly.
            low = slope.to(hidden.dtype)
            grad_hidden[chunk] = low @ head
            if learns_head and has_float32_products(low):
                torch.addmm(
                    grad_head, low.t(), hidden[chunk], out_dtype=torch.float32, out=grad_head
                )
            elif learns_head:
                grad_head.addmm_(slope.t(), hidden[chunk].to(slope))
            del logits, probs, slope, low  # frees the memory before the next chunk
        return grad_hidden, grad_head.to(head) if learns_head else None, None, None, None


def _logits_in_chunks(
    hidden: Tensor, head: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the tokens, and the logits of each divided by the temperature."""
    size = max(SMALLEST_CHUNK, most_logits(hidden.device) // len(head))
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        logits = logits_of(hidden[chunk], head)
        yield chunk, logits if temperature == 1 else logits.div_(temperature)


def most_logits(device: torch.device) -> int:
    """The most logits that a chunk may have on a device."""
    most = MAX_LOGITS[device.type]
    if device.type != "cuda":
        return most
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + unused
    # a logit takes up to 16 bytes, so that a chunk takes at most half of the memory
    return min(4 * most, max(most, free_bytes // 32))

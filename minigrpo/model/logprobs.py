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
from torch import Tensor

from .linear import autocast_dtype, has_float32_products, linear

# Most logits in memory at once. On a CPU they should fit in its cache; a CUDA device with much free
# memory computes up to four times as many.
MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # 16 and 256 MiB of float32
# Fewest tokens per chunk: each chunk reads the whole output head and updates its whole gradient.
SMALLEST_CHUNK = 128


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
    """`[.., D]` and `[V, D]` -> `[.., V]` float32 or wider; the same in sampler and trainer."""
    if not has_float32_products(hidden):
        return at_least_fp32(linear(hidden, head))
    low = hidden.to(autocast_dtype(hidden)).flatten(0, -2)
    return torch.mm(low, head.to(low).t(), out_dtype=torch.float32).unflatten(0, hidden.shape[:-1])


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, learn_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[M]` of next tokens, and entropies `[M]` of their distributions, in nats.

    `hidden` `[M, D]` are final hidden states, `head` `[V, D]` the weights of the output head, and
    `targets` `[M]` int64 the next tokens. Only with `learn_entropy` has the entropy a gradient.
    """
    low = autocast_dtype(hidden)  # autocast does not apply in a custom backward
    return _Chunked.apply(hidden.to(low), head.to(low), targets, temperature, learn_entropy)


class _Chunked(torch.autograd.Function):
    """`token_logprobs` chunk by chunk; the backward pass computes the logits again.

    logp = log_softmax(hidden @ head.T / temperature)[target]
    d logp / d (hidden @ head.T) = (one-hot - softmax) / temperature
    entropy = sum(softmax u) with u = -log-softmax
    d entropy / d (hidden @ head.T) = softmax (u - entropy) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        learn_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, head, targets)
        ctx.temperature = temperature
        ctx.learn_entropy = learn_entropy
        logp, entropy = at_least_fp32(hidden.new_empty(2, len(hidden)))
        for part, logits in _logits_in_chunks(hidden, head, temperature):
            logps = logits.log_softmax(-1)
            logp[part] = logps.gather(-1, targets[part, None])[:, 0]
            entropy[part] = -torch.exp(logps, out=logits).mul_(logps).sum(-1)
            del logits, logps  # before the next chunk's exist
        if not learn_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets = ctx.saved_tensors
        temperature = ctx.temperature
        learns = ctx.needs_input_grad[1]  # a head is frozen under adapters
        grad_head = torch.zeros_like(head if learns else head[:0], dtype=grad.dtype)
        grad_hidden = torch.empty_like(hidden)
        for part, logits in _logits_in_chunks(hidden, head, temperature):
            slope = logits.softmax(-1).neg_()
            slope.scatter_add_(-1, targets[part, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grad[part, None] / temperature)
            if ctx.learn_entropy:
                logps = logits.log_softmax(-1)
                probs = torch.exp(logps, out=logits)
                u = logps * -grad_entropy[part, None]
                u -= (probs * u).sum(-1, keepdim=True)
                slope.addcmul_(probs, u, value=1 / temperature)
            low = slope.to(hidden.dtype)
            grad_hidden[part] = low @ head
            # in place: no second [V, D], which a CPU would convert from bfloat16 slowly
            if learns and has_float32_products(low):
                torch.addmm(
                    grad_head, low.t(), hidden[part], out_dtype=torch.float32, out=grad_head
                )
            elif learns:
                grad_head.addmm_(slope.t(), hidden[part].to(slope))
            del logits, slope, low  # before the next chunk's exist
        return grad_hidden, grad_head.to(head) if learns else None, None, None, None


def _logits_in_chunks(
    hidden: Tensor, head: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Which tokens, and their logits."""
    chunk = max(SMALLEST_CHUNK, most_logits(hidden.device) // len(head))
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        yield part, logits_of(hidden[part], head).div_(temperature)


def most_logits(device: torch.device) -> int:
    most = MAX_LOGITS[device.type]
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused  # bytes; a chunk takes up to 16 a logit
        most = min(4 * most, max(most, free // 32))
    return most

"""From hidden states to log-probabilities: head, temperature, log-softmax, gather.

The log-softmax is computed in float32 at least, whatever the model's precision: in bfloat16 it
would be off by 2-3e-3, which is more than the ratios that a policy loss clips. Logits of M tokens
are M * V floats, and autograd keeps several copies of them; in chunks, recomputed in the backward
pass, there are at most two of them, for one chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # tokens whose logits exist at a time, at most,
# and so many logits: what a CPU's cache holds; a GPU reads the whole head and its gradient for each
# chunk, so there are few
LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # 16 and 256 MiB of float32


def chunk_size(vocab_size: int, device: str) -> int:
    """`device` is a type, as cuda."""
    return max(1, min(CHUNK, LOGITS[device] // vocab_size))


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of `logits / temperature` over the last dimension, in float32 at least.
    temperature > 0.
    """
    return F.log_softmax(at_least_fp32(logits) / temperature, dim=-1)


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probability of given next tokens, and entropy in nats.

    Args:
        hidden: `[M, D]`.
        head: `[V, D]`, the tied embedding.
        targets: `[M]` int64.
        chunk: tokens whose logits exist at a time; 0: all.

    Returns:
        `[M]` and `[M]`, float32 at least. The entropy carries no gradient: it is reported, not
        optimised.
    """
    if chunk and len(hidden) > chunk:
        return _Chunked.apply(hidden, head, targets, temperature, chunk)
    logp = log_softmax(F.linear(hidden, head), temperature)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


class _Chunked(torch.autograd.Function):
    """d logp / d logits = (one-hot - softmax) / temperature, so the backward pass needs the logits
    again and nothing else.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        # autocast does not reach into a backward of one's own: what it would do is done here, once
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        ctx.dtypes, ctx.temperature, ctx.chunk = (hidden.dtype, head.dtype), temperature, chunk
        hidden, head = hidden.to(dtype), head.to(dtype)
        out = at_least_fp32(hidden.new_empty(3, len(hidden)))
        room, more_room = out.new_empty(2, chunk, len(head))
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden[part], head, temperature, room)
            largest = logits.amax(-1, keepdim=True)
            weights = torch.sub(logits, largest, out=more_room[: len(logits)]).exp_()
            total = weights.sum(-1)
            lse = total.log() + largest[:, 0]
            chosen = logits.gather(-1, targets[part, None])[:, 0]
            mean = weights.mul_(logits).sum(-1) / total
            out[:, part] = torch.stack([chosen - lse, lse - mean, lse])
        logp, entropy, lse = out
        ctx.save_for_backward(hidden, head, targets, lse)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, lse = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), at_least_fp32(torch.zeros_like(head))
        room = lse.new_empty(ctx.chunk, len(head))
        for part in _parts(len(hidden), ctx.chunk):
            slope = (
                _logits(hidden[part], head, ctx.temperature, room)
                .sub_(lse[part, None])
                .exp_()
                .neg_()
            )
            slope.scatter_add_(-1, targets[part, None], torch.ones_like(slope[:, :1]))
            slope = slope.mul_(grad[part, None] / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = slope @ head
            if slope.dtype == grad_head.dtype:
                grad_head.addmm_(slope.t(), hidden[part])  # no second gradient of the head's size
            else:
                grad_head += slope.t() @ hidden[part]
        hidden_dtype, head_dtype = ctx.dtypes
        return grad_hidden.to(hidden_dtype), grad_head.to(head_dtype), None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float, room: Tensor) -> Tensor:
    """Logits in the first rows of `room`, which is used again and again: what is freed is not
    always found again.
    """
    logits = room[: len(hidden)]
    if hidden.dtype == room.dtype:
        torch.mm(hidden, head.t(), out=logits)
    else:
        logits.copy_(hidden @ head.t())
    return logits.div_(temperature)


def _parts(size: int, chunk: int) -> list[slice]:
    return [slice(a, min(a + chunk, size)) for a in range(0, size, chunk)]

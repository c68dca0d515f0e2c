"""From hidden states to log-probabilities: output head, temperature, log-softmax, gather.

The log-softmax is computed in float32 or wider, whatever the model's precision. In bfloat16 its
error is 2e-3 to 3e-3, enough to matter for the ratio that a policy loss clips.

The logits of M tokens are M * V floats, and autograd keeps several copies of them. With chunks,
whose logits are recomputed in the backward pass, only about two copies of one chunk exist at once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import by_onednn, linear, product, round_number, weight_gradient

CHUNK = 1024  # most tokens whose logits are in memory at once
# Fewest tokens per chunk, however many their logits: each chunk reads the whole output head and
# updates its whole gradient. With 151,936 tokens in the vocabulary, chunks of 27 were measured to
# take 1.5 times as long on a CPU as chunks of 128.
SMALLEST_CHUNK = 128
# Most logits in memory at once, above that. On a CPU they should fit in its cache.
MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # 16 and 256 MiB of float32


def chunk_size(vocab_size: int, device: str) -> int:
    """Tokens per chunk; `device` is a type, such as cuda."""
    return min(CHUNK, max(SMALLEST_CHUNK, MAX_LOGITS[device] // vocab_size))


def block_size(chunk: int, width: int, size: int, device: str) -> int:
    """Tokens whose slopes, of `size` bytes each, are in memory at once, for a head `[V, width]`.

    Each block makes a whole gradient of the head. On a CPU, where chunks are small, a block is a
    multiple of `chunk` whose slopes take at most half the memory of that gradient in float32.
    """
    return max(1, 2 * width // size // chunk) * chunk if device == "cpu" else chunk


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of `logits / temperature` over the last dimension, in float32 or wider.

    `temperature` must be greater than 0.
    """
    return F.log_softmax(at_least_fp32(logits) / temperature, dim=-1)


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the next tokens, and the entropies of their distributions, in nats.

    Args:
        hidden: `[M, D]`, final hidden states.
        head: `[V, D]`, the tied embedding.
        targets: `[M]` int64, the next tokens.
        chunk: tokens whose logits are in memory at once; 0: all.

    Returns:
        `[M]` and `[M]`, float32 or wider. The entropy has no gradient: it is a metric.
    """
    if chunk and len(hidden) > chunk:
        return _Chunked.apply(hidden, head, targets, temperature, chunk)
    logp = log_softmax(linear(hidden, head), temperature)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


class _Chunked(torch.autograd.Function):
    """`token_logprobs` chunk by chunk.

    d logp / d (hidden @ head.T) = (one-hot - softmax) / temperature, so all that the backward
    pass needs from the forward is the logits, which it recomputes, and their log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        # autocast does not apply in a custom backward, so both passes use tensors cast here
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        ctx.dtypes, ctx.temperature, ctx.chunk = (hidden.dtype, head.dtype), temperature, chunk
        hidden, head = hidden.to(dtype), head.to(dtype)
        out = at_least_fp32(hidden.new_empty(3, len(hidden)))
        buffer, other_buffer = out.new_empty(2, chunk, len(head))
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden[part], head, temperature, buffer)
            largest = logits.amax(-1, keepdim=True)
            weights = torch.sub(logits, largest, out=other_buffer[: len(logits)]).exp_()
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
        hidden, head, _, lse = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), None
        learns = ctx.needs_input_grad[1]  # not a head that is frozen under adapters
        (_, width), kind = head.shape, head.device.type
        rows = block_size(ctx.chunk, width, head.itemsize, kind) if learns else ctx.chunk
        all_slopes = hidden.new_empty(round_number(min(rows, len(hidden))), len(head))
        by = product if by_onednn(all_slopes, head) else F.linear
        for block in _parts(len(hidden), rows):
            size = len(hidden[block])
            slopes = all_slopes[: round_number(size)]  # oneDNN keeps a kernel for each size
            _fill_slopes(slopes[:size], ctx, grad, block.start)
            slopes[size:] = 0
            grad_hidden[block] = by(slopes, head.t())[:size]
            if not learns:
                continue
            x = F.pad(hidden[block], (0, 0, 0, len(slopes) - size))
            if grad_head is None:
                grad_head = weight_gradient(slopes, x)
            elif hidden.dtype == lse.dtype and by is F.linear:
                grad_head.addmm_(slopes.t(), x)  # in place: no second [V, D]
            else:
                grad_head = grad_head.to(lse.dtype).add_(weight_gradient(slopes, x))
        hidden_dtype, head_dtype = ctx.dtypes
        if grad_head is not None:
            grad_head = grad_head.to(head_dtype)
        return grad_hidden.to(hidden_dtype), grad_head, None, None, None


def _fill_slopes(slopes: Tensor, ctx: Any, grad: Tensor, start: int) -> None:
    """Compute the gradient by the logits of a block of tokens, from `start`, into `slopes`."""
    hidden, head, targets, lse = ctx.saved_tensors
    same = hidden.dtype == lse.dtype
    wide = slopes if same else lse.new_empty(min(ctx.chunk, len(slopes)), len(head))
    for part in _parts(len(slopes), ctx.chunk):
        tokens = slice(start + part.start, start + part.stop)
        logits = _logits(hidden[tokens], head, ctx.temperature, slopes[part] if same else wide)
        slope = logits.sub_(lse[tokens, None]).exp_().neg_()
        slope.scatter_add_(-1, targets[tokens, None], torch.ones_like(slope[:, :1]))
        torch.mul(slope, grad[tokens, None] / ctx.temperature, out=slopes[part])


def _logits(hidden: Tensor, head: Tensor, temperature: float, buffer: Tensor) -> Tensor:
    """Compute logits into the first rows of `buffer [chunk, V]`.

    All chunks share the buffer, because the allocator does not always reuse freed memory.
    """
    logits = buffer[: len(hidden)]
    if by_onednn(hidden, head):
        logits.copy_(product(hidden, head))
    elif hidden.dtype == buffer.dtype:
        torch.mm(hidden, head.t(), out=logits)
    else:
        logits.copy_(hidden @ head.t())
    return logits if temperature == 1 else logits.div_(temperature)


def _parts(size: int, chunk: int) -> list[slice]:
    return [slice(a, min(a + chunk, size)) for a in range(0, size, chunk)]

"""Attention of packed tokens in parts that are merged, so that nothing is stored more than once.

A completion's token attends to its prompt and to its own completion. Each is a *part* with a
softmax of its own. The softmax over all keys is their mean, weighted by their sums of exponentials
(Hydragen, Juravsky et al., arXiv 2402.05099). So the keys of a prompt are neither copied for each
completion nor masked for each query.

The backward pass of flash attention needs only the output and the log-sum-exp of the forward pass
(Dao et al., arXiv 2205.14135, algorithm 4). Given those over all keys, it returns a part's share of
the gradients, as in ring attention (Liu et al., arXiv 2310.01889). So autograd keeps queries, keys,
values and the output, packed; rows are gathered from them again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention import rows_of
from .logprobs import at_least_fp32


class Kernel(NamedTuple):
    """Attention of `q [R, H, T, E]` to `k` and `v`, `[R, K, L, E]`, in one of torch's kernels.

    forward: (q, k, v, dropout, causal, attn_mask=) -> the output, and its log-sum-exp `[R, H, T]`.
    backward: (gradient, q, k, v, output, log-sum-exp, dropout, causal, attn_mask=) -> three
        gradients.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# by type of device
KERNELS = {
    "cpu": Kernel(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
}


@dataclass(frozen=True)
class AttentionPart:
    """Padded rows of some tokens, and the keys of each row."""

    query_rows: Tensor  # [R, T] into the packed tokens
    real: Tensor  # [n] places in the flattened rows that are not padding, each another token
    key_rows: Tensor  # [R, L] into the packed tokens
    visible: Tensor | None  # [R, 1, T or 1, L] bool; None: causal
    masks: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False)  # additive

    @classmethod
    def of(
        cls,
        query_rows: np.ndarray,
        real: np.ndarray,
        key_rows: np.ndarray,
        visible: np.ndarray | None = None,
    ) -> "AttentionPart":
        rows, places, keys = map(torch.from_numpy, (query_rows, real, key_rows))
        return cls(rows, places, keys, None if visible is None else torch.from_numpy(visible))

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """`visible` as 0 and -inf; one tensor for all layers."""
        if self.visible is not None and dtype not in self.masks:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self.masks[dtype] = zeros.masked_fill_(~self.visible, -torch.inf)
        return self.masks.get(dtype)

    @property
    def tokens(self) -> Tensor:
        """`[n]`, the packed token at each real place."""
        return self.query_rows.flatten()[self.real]

    def to(self, device: torch.device | str) -> "AttentionPart":
        visible = None if self.visible is None else self.visible.to(device)
        rows, keys = self.query_rows.to(device), self.key_rows.to(device)
        return AttentionPart(rows, self.real.to(device), keys, visible)


def merged_attention(q: Tensor, k: Tensor, v: Tensor, parts: tuple[AttentionPart, ...]) -> Tensor:
    """Attention of each token to its keys in all parts.

    Args:
        q: `[N, H, E]`, one row per packed token; on a device that `KERNELS` names.
        k: `[N, K, E]`; query head h attends to head h // (H / K).
        v: `[N, K, E]`.
        parts: each token has a row in at least one of them, and in none twice.

    Returns:
        `[N, H, E]`.
    """
    out: Tensor = _Merged.apply(q, k, v, parts)
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: tuple[AttentionPart, ...]
    ) -> Tensor:
        kernel = KERNELS[q.device.type].forward
        out = at_least_fp32(q.new_zeros(q.shape))
        lse = out.new_full(q.shape[:2], -torch.inf)  # [N, H], over the keys of the parts so far
        for part in parts:
            q_rows = rows_of(q, part.query_rows)
            k_rows, v_rows = rows_of(k, part.key_rows), rows_of(v, part.key_rows)
            causal, mask = part.visible is None, part.mask(q.dtype)
            padded_out, padded_lse = kernel(q_rows, k_rows, v_rows, 0.0, causal, attn_mask=mask)
            tokens, part_lse = part.tokens, _packed(padded_lse[..., None], part.real).squeeze(-1)
            total = torch.logaddexp(lse[tokens], part_lse)
            before = out[tokens] * (lse[tokens] - total).exp_()[..., None]
            weight = (part_lse - total).exp_()[..., None]
            out[tokens] = before.addcmul_(_packed(padded_out, part.real).to(out.dtype), weight)
            lse[tokens] = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel = KERNELS[q.device.type].backward
        # in float32 or wider: a key's gradients come from many rows
        grads = [at_least_fp32(x.new_zeros(x.shape)) for x in (q, k, v)]
        for part in ctx.parts:
            # Padding has no gradient and no weights. It repeats a token, but sees other keys, and
            # their weights by the token's own sum could be infinite.
            grad_q, grad_k, grad_v = kernel(
                _padded(grad, part, 0.0),
                rows_of(q, part.query_rows),
                rows_of(k, part.key_rows),
                rows_of(v, part.key_rows),
                rows_of(out, part.query_rows),
                _padded(lse[..., None], part, torch.inf).squeeze(-1),
                0.0,
                part.visible is None,
                attn_mask=part.mask(q.dtype),
            )
            _add(grads[0], part.tokens, _packed(grad_q, part.real))
            _add(grads[1], part.key_rows.flatten(), grad_k.transpose(1, 2).flatten(0, 1))
            _add(grads[2], part.key_rows.flatten(), grad_v.transpose(1, 2).flatten(0, 1))
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype), None


def _padded(x: Tensor, part: AttentionPart, filler: float) -> Tensor:
    """`[N, H, E]` -> `[R, H, T, E]`, with `filler` in the places of padding."""
    padded = x.new_full((part.query_rows.numel(), *x.shape[1:]), filler)
    padded[part.real] = x[part.tokens]
    return padded.unflatten(0, part.query_rows.shape).transpose(1, 2)


def _packed(x: Tensor, real: Tensor) -> Tensor:
    """`[R, H, T, E]` -> `[n, H, E]`."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, real)


def _add(total: Tensor, places: Tensor, x: Tensor) -> None:
    total.index_add_(0, places, x.to(total.dtype))

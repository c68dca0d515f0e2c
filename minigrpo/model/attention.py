"""Attention functions: the type that packings and decoders implement, and what they share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .logprobs import at_least_fp32
from .shape import ModelShape

# q [N, H, E], k and v [N, K, E] -> [N, H, E], for N packed tokens, H heads, K heads of keys and
# values (K divides H), heads of size E
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Gather packed tokens into padded rows: `[N, H, E]` and `[R, T]` -> `[R, H, T, E]`.

    index_select has a parallel backward; the backward of `x[rows]` is a serial index_put.
    """
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Attention of `q [B, H, T, E]` to `k` and `v`, `[B, K, T', E]`; causal without a mask.

    Query head h attends to head h // R of the keys, where R = H / K (Ainslie et al., arXiv
    2305.13245). On CUDA, torch has a fused kernel for R > 1 only in half precision without a mask;
    otherwise it would store the scores of all heads in float32. So with a mask, the R queries of a
    token become rows of the attention to their shared head; in float32 without one, keys and values
    are repeated.

    Args:
        mask: `[B, 1, R * T, T']` from `additive_mask`.
    """
    share = q.shape[1] // k.shape[1]
    if share > 1 and mask is not None:
        rows = q.unflatten(1, (-1, share)).flatten(2, 3)  # [B, K, R * T, E]
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        return out.unflatten(2, (share, -1)).flatten(1, 2)
    if share > 1 and q.is_cuda and q.dtype == torch.float32:
        k, v, share = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1), 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=share > 1
    )


def attention(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend(q, k, v)`, always in float32 on a CPU.

    On a CPU, the backward pass of torch's attention was measured to take three times as long in
    bfloat16.
    """
    if q.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return attend(q, k, v)
    with torch.autocast("cpu", enabled=False):
        return attend(at_least_fp32(q), at_least_fp32(k), at_least_fp32(v))


class Causal:
    """Plain causal attention within rows `[B, T]`, packed row after row."""

    def __init__(self, batch: int, length: int) -> None:
        self.shape = (batch, length)

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))  # [B, H, T, E]
        return sdpa(q, k, v).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (Su et al., arXiv 2104.09864) of N packed tokens.

    The first half of a head is rotated against the second half, as in Llama's files.
    """

    cos: Tensor  # [N, 1, E], float32 or wider
    sin: Tensor  # likewise; negative in the first half

    @classmethod
    def of(cls, shape: ModelShape, positions: Tensor, dtype: torch.dtype) -> "Rotation":
        """The rotation by `positions [N]`, for a model whose weights have `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        angles = positions.to(wide)[:, None, None] * frequencies(shape, positions.device).to(wide)
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate `x [N, H, E]`, in float32 or wider."""
        wide = at_least_fp32(x)
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)  # the halves
        return torch.addcmul(wide * self.cos, swapped, self.sin).to(x.dtype)

    def before(self, attend: Attend) -> Attend:
        """An attention function that rotates queries and keys first."""

        def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.rotate(q), self.rotate(k), v)

        return rotated


def frequencies(shape: ModelShape, device: torch.device | None = None) -> Tensor:
    """Rotary frequencies `[E / 2]` float32, in radians per position.

    Computed on the device, because a CUDA graph cannot capture a copy from the host.
    """
    numbers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / shape.rope_theta ** (numbers / shape.head_dim)
    if not (scaling := shape.rope_scaling):
        return plain
    turns = scaling.original_context * plain / (2 * torch.pi)  # in the original context
    share = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)

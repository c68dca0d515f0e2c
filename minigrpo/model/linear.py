"""Linear layers whose frozen weights may be stored in a lower precision than their inputs."""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Numbers in a weight that oneDNN multiplies. Smaller ones stay with MKL, because oneDNN compiles
# code for each new number of rows.
LARGE_WEIGHT = 1 << 19 if torch.backends.mkldnn.is_available() else math.inf
# NF4 of QLoRA (Dettmers et al., arXiv 2305.14314, appendix E): quantiles of a normal distribution
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
BLOCK = 64  # numbers that share a scale; per row, the greatest common divisor of both


def to_nf4(weight: Tensor) -> Tensor:
    """A matrix `[out, in]` in 4.25 bits per number: `[out, blocks, 34]` uint8.

    Of each block the 64 codes, two in a byte, and the scale, its largest magnitude as bfloat16.
    """
    blocks = weight.float().contiguous().unflatten(1, (-1, math.gcd(weight.shape[1], BLOCK)))
    scale = blocks.abs().amax(-1, keepdim=True).bfloat16()
    codes = torch.bucketize(blocks / scale, (NF4[1:] + NF4[:-1]).to(blocks) / 2)  # the nearest
    pairs = codes[..., ::2] * len(NF4) + codes[..., 1::2]
    return torch.cat([pairs.to(torch.uint8), scale.view(torch.uint8)], dim=-1)


@cache  # made in every product, it would be copied to the device for every decoded token
def pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two numbers of each byte, `[256, 2]`."""
    return torch.cartesian_prod(NF4, NF4).to(device, dtype)


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as numbers of a type, however it is stored."""
    if weight.is_floating_point():
        return weight.to(dtype)
    numbers = F.embedding(weight[..., :-2].int(), pairs(weight.device, dtype)).flatten(2)
    return numbers.mul_(weight[..., -2:].view(torch.bfloat16)).flatten(1)


class Linear(nn.Linear):
    """`nn.Linear`, computed in the precision of its input or of autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type that autocast computes products of `x` in; without it, that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def has_float32_products(x: Tensor) -> bool:
    """Whether torch can multiply `x` in 16 bits a number without rounding the sums to them."""
    return x.is_cuda and autocast_dtype(x).itemsize == 2


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, `[..., in]` -> `[..., out]`.

    A weight of another type than `inputs` must be frozen. On a CPU and without gradients, oneDNN
    computes large products in float32: MKL, which torch calls, takes up to twice as long for few
    rows.
    """
    kind = inputs.device.type
    is_low = torch.is_autocast_enabled(kind)
    if weight.dtype == inputs.dtype or (is_low and weight.is_floating_point()):
        plain = is_low or torch.is_grad_enabled() or weight.numel() < LARGE_WEIGHT
        if plain or (kind, inputs.dtype) != ("cpu", torch.float32):
            return F.linear(inputs, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    out = _FrozenWeight.apply(inputs.to(autocast_dtype(inputs)), weight)
    return out if bias is None else out + bias.to(out.dtype)


class _FrozenWeight(torch.autograd.Function):
    """A product with a frozen weight, cast in both passes. Autograd would keep every cast."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        assert not weight.requires_grad
        ctx.save_for_backward(weight)
        return linear(inputs, dense(weight, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ dense(weight, grad.dtype), None

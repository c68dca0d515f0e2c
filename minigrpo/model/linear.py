"""Linear layers whose frozen weights may be stored in a lower precision than their inputs."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Fewest numbers in a weight for oneDNN, which compiles code for each new number of rows.
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
BLOCK = 64  # numbers that share a scale, or the greatest common divisor with a row's length


def to_nf4(weight: Tensor) -> Tensor:
    """Store a matrix `[out, in]` in 4.25 bits per number, `[out, blocks, 34]` uint8.

    Each block has 64 codes, two in a byte, and its largest magnitude as bfloat16.
    """
    block = math.gcd(weight.shape[1], BLOCK)
    numbers = weight.float().contiguous()
    blocks = numbers.unflatten(1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).bfloat16()
    midpoints = (NF4[1:] + NF4[:-1]).to(blocks) / 2
    codes = torch.bucketize(blocks / scale, midpoints)  # the nearest number in NF4
    first = codes[..., ::2]
    second = codes[..., 1::2]
    two_codes = first * len(NF4) + second
    return torch.cat([two_codes.to(torch.uint8), scale.view(torch.uint8)], dim=-1)


@cache  # without it, each product would copy the table to the device, for every decoded token
def numbers_by_byte(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two numbers that each byte stands for, `[256, 2]`."""
    return torch.cartesian_prod(NF4, NF4).to(device, dtype)


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as numbers of a type, however it is stored."""
    if weight.is_floating_point():
        return weight.to(dtype)
    return nf4_decoder(weight.device)(weight, numbers_by_byte(weight.device, dtype))


def from_nf4(weight: Tensor, table: Tensor) -> Tensor:
    """Undo `to_nf4`, with the `table [256, 2]` of the numbers that each byte stands for."""
    codes = weight[..., :-2].int()
    scale = weight[..., -2:].view(torch.bfloat16)
    numbers = F.embedding(codes, table).flatten(2)
    return numbers.mul_(scale).flatten(1)


@cache
def nf4_decoder(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`from_nf4`, on CUDA as one kernel: it takes a third of the time of three."""
    if device.type == "cpu":
        return from_nf4
    compiled = torch.compile(from_nf4, dynamic=True)
    try:
        compiled(to_nf4(NF4[None]).to(device), numbers_by_byte(device, torch.bfloat16))
    except Exception:  # it needs a C compiler, which many machines do not have
        return from_nf4
    return compiled


def times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


class Linear(nn.Linear):
    """`nn.Linear`, computed in the precision of its input or of autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of `x` are computed: autocast's, or the type of `x`."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def has_float32_products(x: Tensor) -> bool:
    """Whether torch multiplies `x` in 16 bits and can return the sums in float32."""
    return x.is_cuda and autocast_dtype(x).itemsize == 2


def cast_once(inputs: Tensor) -> Tensor:
    """Cast the inputs of several products; with gradients, which float32 sums, each casts them."""
    return inputs if torch.is_grad_enabled() else inputs.to(autocast_dtype(inputs))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`; a weight of another type is frozen, or autocast casts it."""
    if weight.dtype != autocast_dtype(inputs) and not weight.requires_grad:
        out = _FrozenWeight.apply(inputs.to(autocast_dtype(inputs)), weight)
        return out if bias is None else out + bias.to(out.dtype)
    # For few rows, MKL, which F.linear calls on a CPU, takes up to twice as long as oneDNN.
    prefers_onednn = (
        inputs.is_cpu
        and inputs.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_grad_enabled()
        and weight.numel() >= LARGE_WEIGHT
    )
    if prefers_onednn:
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return F.linear(inputs, weight, bias)


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

"""Linear layers, with two departures from torch's: frozen weights may be stored in a lower
precision than their inputs, and under autocast on a CPU the number of rows is rounded up.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear`, computed in the precision of its input or of autocast; not initialised."""

    def reset_parameters(self) -> None:
        """A Transformer initialises its weights, or loads them."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`. A weight of another type than `x` must be frozen."""
    if torch.is_autocast_enabled(x.device.type):
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        return (_in_few_sizes if on_cpu else F.linear)(x, weight, bias)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    out: Tensor = _FrozenWeight.apply(x, weight)
    return out if bias is None else out + bias.to(out.dtype)


def _in_few_sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with rows of zeros that make up a round number.

    oneDNN, which computes in bfloat16, compiles a kernel for each number of rows, and keeps it:
    with the row counts of packing and sampling, a run would grow by megabytes per step.
    """
    shape = x.shape[:-1]
    rows = shape.numel()
    step = 1 << max(0, rows.bit_length() - 4)  # at most 1/8 more
    size = -(-rows // step) * step
    padded = x.new_zeros(size, x.shape[-1], dtype=torch.get_autocast_dtype("cpu"))
    padded[:rows] = x.reshape(rows, -1)
    return F.linear(padded, weight, bias)[:rows].view(*shape, -1)


class _FrozenWeight(torch.autograd.Function):
    """A product with a frozen weight, cast in both passes.

    Autograd would keep the cast weight of every layer until the backward pass: a whole model in the
    wider type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert not weight.requires_grad
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None

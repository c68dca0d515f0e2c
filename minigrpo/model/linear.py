"""Linear layers whose frozen weights may be stored in a lower precision than their inputs."""

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
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    out: Tensor = _FrozenWeight.apply(x, weight)
    return out if bias is None else out + bias.to(out.dtype)


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

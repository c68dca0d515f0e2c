"""Linear layers: frozen weights in a lower precision than their inputs, and products by oneDNN.

On a CPU, torch computes float32 products with Intel's MKL, which uses AVX-512 on Intel's processors
only. oneDNN, which torch has for bfloat16, uses it on all that have it. There its products take
less than half the time, so `linear` uses it for float32 too.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
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
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast and x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _in_few_sizes(x, weight, bias)
    if not autocast and by_onednn(x, weight):
        compute: Callable[..., Tensor] = _OneDNN.apply if torch.is_grad_enabled() else product
        return compute(x, weight, bias)
    if weight.dtype == x.dtype or autocast:
        return F.linear(x, weight, bias)
    out: Tensor = _FrozenWeight.apply(x, weight)
    return out if bias is None else out + bias.to(out.dtype)


def _in_few_sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` under autocast on a CPU, with rows of zeros that make up a round number.

    oneDNN compiles a kernel for each number of rows, and keeps it: with the row counts that packing
    and sampling produce, a run would grow by megabytes per step.
    """
    shape = x.shape[:-1]
    rows = shape.numel()
    padded = x.new_zeros(round_number(rows), x.shape[-1], dtype=torch.get_autocast_dtype("cpu"))
    padded[:rows] = x.reshape(rows, -1)
    return F.linear(padded, weight, bias)[:rows].view(*shape, -1)


# --- oneDNN ---------------------------------------------------------------------------------------

CPU_INFO = Path("/proc/cpuinfo")  # Linux only
SMALLEST = 1 << 21  # multiplications; of smaller products, the call itself is what takes time
# Numbers in a weight. oneDNN keeps a kernel for each shape of a product: 100 MiB in the default job
# (whose weights are smaller, and whose steps take as long with oneDNN as without).
SMALLEST_WEIGHT = 1 << 17
_enabled: list[bool] = []  # what `use_onednn` was told last


@cache
def onednn_is_faster() -> bool:
    """Whether the processor has AVX-512 and is not Intel's, and this torch can call oneDNN."""
    try:
        intel = "GenuineIntel" in CPU_INFO.read_text()
    except OSError:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not intel and has_onednn()


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(enabled: bool) -> None:
    """Compute large float32 products with oneDNN, in the whole process, or not."""
    _enabled[:] = [enabled]


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear(x, weight)` is computed with oneDNN."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * len(weight) >= SMALLEST
        and weight.numel() >= SMALLEST_WEIGHT
        and (_enabled[0] if _enabled else onednn_is_faster())
        and not torch.compiler.is_compiling()
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [.., in] @ weight.T + bias` by oneDNN, without a gradient."""
    shape = x.shape[:-1]
    rows = _rounded(x.reshape(shape.numel(), -1))
    out = _onednn(rows, weight, bias)
    return out[: shape.numel()].view(*shape, -1)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`grad [rows, out].T @ x [rows, in]`, by oneDNN where `by_onednn` chooses it."""
    out, rows = grad.t(), x.t()
    return _onednn(out, rows) if by_onednn(out, rows) else out @ x


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _rounded(x: Tensor) -> Tensor:
    """`x [rows, in]` with rows of zeros that make up a round number: see `_in_few_sizes`."""
    more = round_number(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, more)) if more else x


class _OneDNN(torch.autograd.Function):
    """`product`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad, weight.t())
        if ctx.needs_input_grad[1]:
            rows = (_rounded(a.reshape(-1, a.shape[-1])) for a in (grad, x))
            grad_weight = weight_gradient(*rows)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_weight, grad_bias


def round_number(count: int) -> int:
    """The next of eight sizes between a power of two and its double: at most 1/8 more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


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

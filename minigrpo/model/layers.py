"""The parts of a block, in the variants that `ModelShape` names.

Submodules have the names that parameters have in the files of GPT-2 (c_attn, c_proj, c_fc) and of
Llama and its relatives (q_proj, gate_proj, ...), so that reading a file is a matter of prefixes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear
from .logprobs import at_least_fp32
from .shape import ModelShape


class RMSNorm(nn.Module):
    """Divide by the root mean square, in float32 or wider (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class FusedAttention(nn.Module):
    """GPT-2's projections: one layer for queries, keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Linear(shape.width, 3 * shape.width, bias=shape.qkv_bias)
        self.c_proj = Linear(shape.width, shape.width, bias=shape.out_bias)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries, keys and values, `[N, H, E]` each."""
        return self.c_attn(x).view(len(x), 3, self.heads, -1).unbind(1)

    def project(self, x: Tensor) -> Tensor:
        """`[N, H, E]` -> `[N, D]`."""
        return self.c_proj(x.flatten(1))


class SeparateAttention(nn.Module):
    """Llama's projections, where several query heads may share keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim, bias = shape.head_dim, shape.qkv_bias
        queries, keys = shape.heads * shape.head_dim, shape.kv_width
        self.q_proj = Linear(shape.width, queries, bias=bias)
        self.k_proj = Linear(shape.width, keys, bias=bias)
        self.v_proj = Linear(shape.width, keys, bias=bias)
        self.o_proj = Linear(queries, shape.width, bias=shape.out_bias)
        # Qwen3's norms of each head
        make: Callable[[], nn.Module] = (
            (lambda: RMSNorm(shape.head_dim, shape.norm_eps)) if shape.head_norm else nn.Identity
        )
        self.q_norm, self.k_norm = make(), make()

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries `[N, H, E]`, keys and values `[N, K, E]`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # norms in float32 must not double the cache of keys under autocast
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v

    def project(self, x: Tensor) -> Tensor:
        """`[N, H, E]` -> `[N, D]`."""
        return self.o_proj(x.flatten(1))


class MLP(nn.Module):
    """GPT-2's: width -> 4 * width -> width, with tanh-GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.c_proj = Linear(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """Llama's SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.up_proj = Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


Attention = FusedAttention | SeparateAttention
NORMS: dict[str, Callable[[int, float], nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}
PROJECTIONS: dict[str, Callable[[ModelShape], Attention]] = {
    "fused": FusedAttention,
    "separate": SeparateAttention,
}
MLPS: dict[str, Callable[[ModelShape], nn.Module]] = {"gelu": MLP, "swiglu": GatedMLP}
INTO_RESIDUAL = ("c_proj.weight", "o_proj.weight", "down_proj.weight")  # started smaller

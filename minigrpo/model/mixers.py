"""The parts of a block. Mixers let N tokens of width D see others; norms and MLPs do not.

`project_in` makes `[N, D]` into what is mixed and `project_out` makes `[N, M]` into `[N, D]`, token
by token. Between them, `mix` asks a context (context.py) what the tokens before each one had.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .delta import Needs, gated_delta, unit
from .linear import Linear, times
from .logprobs import at_least_fp32
from .rotary import Rotations
from .shape import AttentionShape, GatedDeltaShape, ModelShape, ShortConvShape
from .weights import Role

gelu = partial(F.gelu, approximate="tanh")


class RMSNorm(nn.RMSNorm):
    """Root mean square normalisation (arXiv 1910.07467), in the precision of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        # in the precision of the input, or under autocast the cache of keys would double
        return super().forward(hidden.to(self.weight.dtype)).to(hidden.dtype)


class Attention(nn.Module):
    """Softmax attention, where several query heads may share keys and values."""

    def __init__(self, shape: ModelShape, layer: AttentionShape, number: int) -> None:
        super().__init__()
        self.number = number
        self.window = layer.window
        self.rope = layer.rope
        self.query_scale = shape.query_scale
        self.head_dim = shape.head_dim
        family = shape.family_row
        # 1. The projections.
        qkv_bias = shape.attention_bias or family.biases != "none"
        out_bias = shape.attention_bias or family.biases == "all"
        q_width = shape.heads * shape.head_dim
        kv_width = shape.kv_width
        self.gate = family.attention_gate
        gate_width = q_width if self.gate == "query" else 0
        self.widths = [q_width + gate_width, kv_width, kv_width]
        self.is_fused = family.has_fused_qkv
        if self.is_fused:
            self.qkv_proj = Linear(shape.width, sum(self.widths), bias=qkv_bias)
        else:
            self.q_proj = Linear(shape.width, q_width + gate_width, bias=qkv_bias)
            self.k_proj = Linear(shape.width, kv_width, bias=qkv_bias)
            self.v_proj = Linear(shape.width, kv_width, bias=qkv_bias)
        self.o_proj = Linear(q_width, shape.width, bias=out_bias)
        if self.gate == "head":
            self.g_proj = Linear(shape.width, shape.heads, bias=False)
        # 2. The norms of queries and keys.
        norm: type[nn.Module] = nn.Identity if family.qk_norm == "none" else RMSNorm
        self.norms_width = family.qk_norm == "width"
        self.q_norm = norm(q_width if self.norms_width else shape.head_dim, shape.norm_eps)
        self.k_norm = norm(kv_width if self.norms_width else shape.head_dim, shape.norm_eps)

    def project_in(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries `[N, H, E]`, keys and values `[N, K, E]`, perhaps a gate."""
        gate: tuple[Tensor, ...] = ()
        if self.is_fused:
            q, k, v = self.qkv_proj(hidden).split(self.widths, dim=-1)
        else:
            q = self.q_proj(hidden)
            k = self.k_proj(hidden)
            v = self.v_proj(hidden)
        if self.gate == "head":
            gate = (self.g_proj(hidden)[..., None],)
        if self.gate == "query":
            of_heads = q.unflatten(-1, (-1, 2, self.head_dim))
            q, gate_of_heads = of_heads.unbind(2)
            q = q.flatten(1)
            gate = (gate_of_heads,)
        if self.norms_width:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if not self.norms_width:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v, *gate

    def mix(self, context: Context, rotations: Rotations, *projected: Tensor) -> Tensor:
        q, k, v, *gate = projected
        if self.rope:
            both = rotations[self.rope](torch.cat([q, k], dim=1))
            q, k = both.split([q.shape[1], k.shape[1]], dim=1)
        q = times(q, self.query_scale)
        attended = context.attend(self.number, self.window, q, k, v)
        if gate:
            attended = attended * gate[0].sigmoid()
        return attended.flatten(1)

    def project_out(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed)


class CausalConv(nn.Module):
    """A convolution along each text, of each channel by itself."""

    role: Role = "kernel"  # of its own parameters

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # the last tap is the token's

    def forward(self, context: Context, layer: int, inputs: Tensor) -> Tensor:
        """`[N, C]` -> `[N, C]`."""
        taps = self.weight[:, 0].t()  # [taps, C]
        before = context.previous(layer, inputs, len(taps) - 1)
        return inputs * taps[-1] + (before * taps[:-1]).sum(1)


class ShortConv(nn.Module):
    """LFM2's gated convolution: C * conv(B * x), where B, C and x are projections."""

    def __init__(self, shape: ModelShape, layer: ShortConvShape, number: int) -> None:
        super().__init__()
        self.number = number
        self.in_proj = Linear(shape.width, 3 * shape.width, bias=False)
        self.conv = CausalConv(shape.width, layer.taps)
        self.out_proj = Linear(shape.width, shape.width, bias=False)

    def project_in(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> B * x and C, `[N, D]` each."""
        in_gate, out_gate, x = self.in_proj(hidden).chunk(3, dim=-1)
        return in_gate * x, out_gate

    def mix(self, context: Context, rotations: Rotations, *projected: Tensor) -> Tensor:
        gated, out_gate = projected
        return out_gate * self.conv(context, self.number, gated)

    def project_out(self, mixed: Tensor) -> Tensor:
        return self.out_proj(mixed)


class GatedDelta(nn.Module):
    """The gated delta rule of Yang et al. (arXiv 2412.06464), as in Qwen3.5. See delta.py."""

    role: Role = "decay"  # of its own parameters

    def __init__(self, shape: ModelShape, layer: GatedDeltaShape, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = layer
        key_width = layer.key_heads * layer.key_dim
        value_width = layer.value_heads * layer.value_dim
        self.widths = [key_width, key_width, value_width, layer.value_heads, layer.value_heads]
        mixed_width = 2 * key_width + value_width
        from_width = partial(Linear, shape.width, bias=False)
        self.in_proj_qkv = from_width(mixed_width)
        self.in_proj_z = from_width(value_width)
        self.in_proj_b = from_width(layer.value_heads)
        self.in_proj_a = from_width(layer.value_heads)
        self.conv1d = CausalConv(mixed_width, layer.taps)
        self.A_log = nn.Parameter(torch.empty(layer.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(layer.value_heads))
        self.norm = RMSNorm(layer.value_dim, shape.norm_eps)
        self.out_proj = Linear(value_width, shape.width, bias=False)

    def project_in(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries with keys and values, the gate of outputs, and those of the state."""
        projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return tuple(project(hidden) for project in projections)

    def mix(self, context: Context, rotations: Rotations, *projected: Tensor) -> Tensor:
        qkv, out_gate, strength, step = projected
        with torch.autocast(qkv.device.type, enabled=False):
            qkv = F.silu(self.conv1d(context, self.number, qkv))
            rate = self.A_log.exp() * F.softplus(at_least_fp32(step) + self.dt_bias)
            inputs = torch.cat([qkv, -rate, at_least_fp32(strength).sigmoid()], dim=-1)
            found = context.recur(self.number, self.scan, inputs)  # [N, value heads, value size]
            gate = at_least_fp32(out_gate).view_as(found)
            return (self.norm(found) * F.silu(gate)).flatten(1).to(out_gate.dtype)

    def scan(
        self,
        states: Tensor | None,
        inputs: Tensor,
        needs: Needs,
    ) -> tuple[Tensor, Tensor]:
        """`[C, T, F]` -> `[C, T, value heads, value size]`; inputs of zeros change no state."""
        layer = self.layer
        q, k, v, log_decay, strength = inputs.split(self.widths, dim=-1)
        q = q.unflatten(-1, (layer.key_heads, -1)).transpose(1, 2)
        k = k.unflatten(-1, (layer.key_heads, -1)).transpose(1, 2)
        v = v.unflatten(-1, (layer.value_heads, -1)).transpose(1, 2)
        keys_per_value = layer.value_heads // layer.key_heads
        q = unit(q).repeat_interleave(keys_per_value, dim=1)
        k = unit(k).repeat_interleave(keys_per_value, dim=1)
        q = q * layer.key_dim**-0.5
        if states is None:
            states = v.new_zeros(*v.shape[:2], layer.key_dim, layer.value_dim)
        outputs, states = gated_delta(q, k, v, log_decay.mT, strength.mT, states, needs)
        return outputs.transpose(1, 2), states

    def project_out(self, mixed: Tensor) -> Tensor:
        return self.out_proj(mixed)


# mixer of a LayerShape -> (its name in a block, its class)
MIXERS: dict[str, tuple[str, Any]] = {
    "attention": ("attn", Attention),
    "short_conv": ("conv", ShortConv),
    "gated_delta": ("linear_attn", GatedDelta),
}


class MLP(nn.Module):
    """The part of a block that widens each token; most have a gate (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        family = shape.family_row
        self.activation: Callable[[Tensor], Tensor] = F.silu
        if family.activation == "gelu":
            self.activation = gelu
        bias = shape.mlp_bias or family.biases == "all"
        from_width = partial(Linear, shape.width, bias=bias)
        self.has_gate = family.gate != "none"
        self.is_fused = family.gate == "fused"
        if self.is_fused:
            self.gate_up_proj = from_width(2 * shape.mlp_width)
        else:
            if self.has_gate:
                self.gate_proj = from_width(shape.mlp_width)
            self.up_proj = from_width(shape.mlp_width)
        self.down_proj = Linear(shape.mlp_width, shape.width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.has_gate:
            return self.down_proj(self.activation(self.up_proj(hidden)))
        if self.is_fused:
            gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        else:
            gate = self.gate_proj(hidden)
            up = self.up_proj(hidden)
        return self.down_proj(self.activation(gate) * up)


def make_norm(shape: ModelShape) -> nn.Module:
    norm = nn.LayerNorm if shape.family_row.norm == "layer" else RMSNorm
    return norm(shape.width, shape.norm_eps)

"""A decoder-only transformer on packed tokens: GPT-2, Llama, Qwen and their relatives.

What differs from the textbook: blocks take packed tokens `x [N, D]`, not `[batch, time, D]`, and
call a function `attend` that determines which tokens attend to which (packing.py for training,
decoder.py for decoding). So a training forward spends no linear layer on padding, and runs shared
tokens once. `ModelShape` says which variant of each part a model has.
"""

import operator
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear, linear
from .logprobs import at_least_fp32, token_logprobs
from .packing import Packing, sdpa
from .shape import ModelShape as ModelShape
from .weights import Weights

# The attention of one layer: its number, q [N, H, E], k and v [N, K, E] -> [N, H, E], for N packed
# tokens, H heads of queries, K heads of keys and values (K divides H), heads of size E.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotate = Callable[[Tensor], Tensor]


# --- positions and attention ----------------------------------------------------------------------


def attention(
    attend: Callable[..., Tensor], rotate: Rotate | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """`attend` on rotated queries and keys, always in float32 or wider on a CPU.

    On a CPU, the backward pass of torch's attention was measured to take three times as long in
    bfloat16.
    """
    with torch.autocast("cpu", enabled=False):
        if q.device.type == "cpu":
            q, k, v = (at_least_fp32(x) for x in (q, k, v))
        if rotate:
            q, k = rotate(q), rotate(k)
        return attend(q, k, v)


def rotation(shape: ModelShape, positions: Tensor) -> Rotate:
    """A function that rotates `x [N, H, E]` by `positions [N]` (Su et al., arXiv 2104.09864).

    The first half of a head is rotated against the second half, as in Llama's files; in float32 or
    wider, whatever the model's precision.
    """
    angles = positions[:, None, None] * frequencies(shape, positions.device)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # [N, 1, E]

    def rotate(x: Tensor) -> Tensor:
        swapped = at_least_fp32(x).roll(x.shape[-1] // 2, dims=-1)  # the halves
        return torch.addcmul(at_least_fp32(x) * cos, swapped, sin).to(x.dtype)

    return rotate


@cache  # made in every forward, they would be copied to the device for every decoded token
def frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Rotary frequencies `[E / 2]` float32, in radians per position."""
    numbers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    found = 1.0 / shape.rope_theta ** (numbers / shape.head_dim)
    if scaling := shape.rope_scaling:
        turns = scaling.original_max_position_embeddings * found / (2 * torch.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = ((turns - low) / (high - low)).clamp(0, 1)
        found = found * share + found / scaling.factor * (1 - share)
    return found.to(device)


# --- the parts of a block, with the names that parameters have in files ---------------------------


class RMSNorm(nn.RMSNorm):
    """Divide by the root mean square, in the precision of the weights (arXiv 1910.07467).

    The result is in that of its input: norms must not double the cache of keys under autocast.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def make_norm(shape: ModelShape) -> nn.Module:
    return (nn.LayerNorm if shape.is_gpt2 else RMSNorm)(shape.width, shape.norm_eps)


class GPT2Projections(nn.Module):
    """GPT-2's projections: one layer for queries, keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Linear(shape.width, 3 * shape.width)
        self.c_proj = Linear(shape.width, shape.width)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries, keys and values, `[N, H, E]` each."""
        return self.c_attn(x).view(len(x), 3, self.heads, -1).unbind(1)

    def project(self, x: Tensor) -> Tensor:
        """`[N, H, E]` -> `[N, D]`."""
        return self.c_proj(x.flatten(1))


class LlamaProjections(nn.Module):
    """Llama's projections, where several query heads may share keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim, has_bias = shape.head_dim, shape.family == "qwen2"
        queries = shape.heads * shape.head_dim
        self.q_proj = Linear(shape.width, queries, bias=has_bias)
        self.k_proj = Linear(shape.width, shape.kv_width, bias=has_bias)
        self.v_proj = Linear(shape.width, shape.kv_width, bias=has_bias)
        self.o_proj = Linear(queries, shape.width, bias=False)
        norm: type[nn.Module] = RMSNorm if shape.family == "qwen3" else nn.Identity
        self.q_norm = norm(shape.head_dim, shape.norm_eps)  # of each head, before it is rotated
        self.k_norm = norm(shape.head_dim, shape.norm_eps)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[N, D]` -> queries `[N, H, E]`, keys and values `[N, K, E]`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.q_norm(q), self.k_norm(k), v

    def project(self, x: Tensor) -> Tensor:
        """`[N, H, E]` -> `[N, D]`."""
        return self.o_proj(x.flatten(1))


class MLP(nn.Module):
    """GPT-2's: width -> 4 * width -> width, with tanh-GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.width, shape.mlp_width)
        self.c_proj = Linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """Llama's SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention = attention  # device.py keeps it out of compiled blocks
        self.ln_1 = make_norm(shape)
        self.attn = (GPT2Projections if shape.is_gpt2 else LlamaProjections)(shape)
        self.ln_2 = make_norm(shape)
        self.mlp = (MLP if shape.is_gpt2 else GatedMLP)(shape)

    def forward(self, x: Tensor, attend: Callable[..., Tensor], rotate: Rotate | None) -> Tensor:
        q, k, v = self.attn.qkv(self.ln_1(x))
        x = x + self.attn.project(self.attention(attend, rotate, q, k, v))
        return x + self.mlp(self.ln_2(x))


# --- the model ----------------------------------------------------------------------------------


class Transformer(Weights):
    """A decoder with GPT-2's names for its parts; weights.py fills and saves it."""

    def __init__(self, shape: ModelShape, seed: int | None = 0) -> None:
        """Random weights from `seed`; with None the model is on `meta`, without memory."""
        super().__init__()
        self.shape = shape
        self.run_block: Callable[..., Tensor] = operator.call  # or with checkpoints: see device.py
        with torch.device("meta"):  # where torch's own initialisation takes no time
            self.wte = nn.Embedding(shape.vocab_size, shape.width)
            self.wpe = nn.Embedding(shape.context, shape.width) if shape.is_gpt2 else None
            self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.ln_f = make_norm(shape)
            self.head = None if shape.tied else Linear(shape.width, shape.vocab_size, bias=False)
        if seed is not None:
            self.initialise(torch.Generator().manual_seed(seed))

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, `[V, D]`."""
        return self.wte.weight if self.head is None else self.head.weight

    def forward_hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states `[N, D]` of N packed tokens, of any texts in any order.

        Args:
            ids: `[N]` int64.
            positions: `[N]` int64, the position of each token in its own text.
            attend: which tokens attend to which.
        """
        x = self.wte(ids).to(self.ln_f.weight.dtype)  # frozen embeddings may be in lower precision
        rotate = None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            rotate = rotation(self.shape, positions)
        for layer, block in enumerate(self.h):
            how = rotate if self.shape.rotates(layer) else None
            x = self.run_block(block, x, partial(attend, layer), how)
        return self.ln_f(x)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        return linear(hidden, self.head_weight)

    def logits(self, ids: Tensor) -> Tensor:
        """Plain causal forward of right-padded rows: `[B, T]` int64 -> `[B, T, V]`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, ids.shape).transpose(1, 2) for x in (q, k, v))  # [B, H, T, E]
            return sdpa(q, k, v).transpose(1, 2).flatten(0, 1)

        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.forward_hidden(ids.flatten(), positions.flatten(), attend)
        return self.lm_head(hidden).unflatten(0, ids.shape)

    def predictors(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """The hidden states `[M, D]` that predict a completion token, and the head `[V, D]`."""
        hidden = self.forward_hidden(packing.ids, packing.positions, packing.attend)
        return hidden.index_select(0, packing.sources), self.head_weight

    def forward(
        self,
        packing: Packing,
        temperature: float = 1.0,
        learn_entropy: bool = False,
        other: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probability of each completion token, and the entropy of its distribution.

        The output head runs only on the M packed tokens that predict a completion token.

        Args:
            learn_entropy: whether the entropy has a gradient.
            other: `predictors` of a frozen model; then the KL to it is the third result.

        Returns:
            Tensors `[P, G, S]`, float32 or wider, in nats, 0 where masked.
        """
        hidden, head = self.predictors(packing)
        found = token_logprobs(hidden, head, packing.targets, temperature, learn_entropy, other)
        return tuple(x[packing.index].where(packing.mask, 0) for x in found)

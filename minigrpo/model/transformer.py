"""A decoder-only transformer on packed tokens: GPT-2, Llama, Qwen and their relatives.

Blocks take packed tokens `[N, D]`, not `[batch, time, D]`, and call a function `attend` that
determines which tokens attend to which (packing.py for training, decoder.py for decoding). So a
training forward runs no linear layer on padding, and runs shared tokens once.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .linear import Linear, linear
from .logprobs import at_least_fp32, token_logprobs
from .packing import Packing, causal
from .rotary import Rotations, rotation
from .shape import ModelShape as ModelShape
from .weights import Weights

# Queries [N, H, E], keys and values [N, K, E] of N packed tokens, heads of size E; K divides H.
QKV = tuple[Tensor, Tensor, Tensor]
# The attention of one layer: its number, queries, keys and values -> [N, H, E].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.RMSNorm):
    """Root mean square normalisation (arXiv 1910.07467), in the precision of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        # in the precision of the input, or under autocast the cache of keys would double
        return super().forward(hidden.to(self.weight.dtype)).to(hidden.dtype)


def times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


def make_norm(shape: ModelShape) -> nn.Module:
    norm = nn.LayerNorm if shape.family_row.is_gpt2 else RMSNorm
    return norm(shape.width, shape.norm_eps)


class GPT2Projections(nn.Module):
    """GPT-2's projections: one layer for queries, keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Linear(shape.width, 3 * shape.width)
        self.c_proj = Linear(shape.width, shape.width)

    def qkv(self, hidden: Tensor) -> QKV:
        qkv = self.c_attn(hidden)
        return qkv.view(len(hidden), 3, self.heads, -1).unbind(1)

    def project(self, attended: Tensor) -> Tensor:
        return self.c_proj(attended)


class LlamaProjections(nn.Module):
    """Llama's projections, where several query heads may share keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        qkv_bias = shape.attention_bias or shape.family_row.qkv_bias
        q_width = shape.heads * shape.head_dim
        kv_width = shape.kv_width
        self.q_proj = Linear(shape.width, q_width, bias=qkv_bias)
        self.k_proj = Linear(shape.width, kv_width, bias=qkv_bias)
        self.v_proj = Linear(shape.width, kv_width, bias=qkv_bias)
        self.o_proj = Linear(q_width, shape.width, bias=shape.attention_bias)
        norm: type[nn.Module] = nn.Identity if shape.family_row.qk_norm == "none" else RMSNorm
        self.norms_width = shape.family_row.qk_norm == "width"
        if not self.norms_width:
            q_width = kv_width = shape.head_dim
        self.q_norm = norm(q_width, shape.norm_eps)
        self.k_norm = norm(kv_width, shape.norm_eps)

    def qkv(self, hidden: Tensor) -> QKV:
        q = self.q_proj(hidden)
        k = self.k_proj(hidden)
        v = self.v_proj(hidden)
        if self.norms_width:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if not self.norms_width:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

    def project(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended)


gelu = partial(F.gelu, approximate="tanh")


class MLP(nn.Module):
    """GPT-2's MLP: width -> 4 * width -> width, with tanh-GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.width, shape.mlp_width)
        self.c_proj = Linear(shape.mlp_width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(gelu(self.c_fc(hidden)))


class GatedMLP(nn.Module):
    """Llama's MLP: SwiGLU, or another gate (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate: Callable[[Tensor], Tensor] = gelu if shape.family_row.gate == "gelu" else F.silu
        linear_from_width = partial(Linear, shape.width, bias=shape.mlp_bias)
        self.is_fused = shape.family_row.has_fused_gate
        if self.is_fused:
            self.gate_up_proj = linear_from_width(2 * shape.mlp_width)
        else:
            self.gate_proj = linear_from_width(shape.mlp_width)
            self.up_proj = linear_from_width(shape.mlp_width)
        self.down_proj = Linear(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_fused:
            gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        else:
            gate = self.gate_proj(hidden)
            up = self.up_proj(hidden)
        return self.down_proj(self.gate(gate) * up)


@cache
def compiled_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a block, compiled once for all layers and any number of tokens."""
    # DDP's own option splits graphs to overlap communication; blocks are compiled apart anyway
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(function, dynamic=True)


class Block(nn.Module):
    """Attention and MLP, each with norms before or after it and a residual connection."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.rope_theta = shape.rope_theta_of(layer)
        self.query_scale = shape.query_scale
        self.residual_multiplier = shape.residual_multiplier
        family = shape.family_row
        norm_before = nn.Identity if family.norms == "after" else make_norm
        norm_after = nn.Identity if family.norms == "before" else make_norm
        self.ln_1 = norm_before(shape)
        self.attn = GPT2Projections(shape) if family.is_gpt2 else LlamaProjections(shape)
        self.ln_1_after = norm_after(shape)
        self.ln_2 = norm_before(shape)
        self.mlp = MLP(shape) if family.is_gpt2 else GatedMLP(shape)
        self.ln_2_after = norm_after(shape)

    def forward(
        self, hidden: Tensor, attend: Attend, rotations: Rotations, compiled: bool
    ) -> Tensor:
        """`[N, D]` -> `[N, D]`."""
        # Attention is not compiled, because its shapes differ from batch to batch. On a CPU it runs
        # in float32 or wider: in bfloat16, its backward pass takes three times as long.
        before = Block.before_attention
        after = Block.after_attention
        if compiled:
            before = compiled_part(before)
            after = compiled_part(after)
        q, k, v = before(self, hidden)
        with torch.autocast("cpu", enabled=False):
            if q.is_cpu:
                q, k, v = map(at_least_fp32, (q, k, v))
            if self.rope_theta:
                rotate = rotations[self.rope_theta]
                q = rotate(q)
                k = rotate(k)
            q = times(q, self.query_scale)
            attended = attend(self.layer, q, k, v)
        return after(self, hidden, attended)

    def before_attention(self, hidden: Tensor) -> QKV:
        return self.attn.qkv(self.ln_1(hidden))

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The block's inputs `[N, D]` and attention's results `[N, H, E]` -> `[N, D]`."""
        projected = self.attn.project(attended.flatten(1))
        from_attention = self.ln_1_after(projected)
        hidden = hidden + times(from_attention, self.residual_multiplier)
        from_mlp = self.ln_2_after(self.mlp(self.ln_2(hidden)))
        return hidden + times(from_mlp, self.residual_multiplier)


class Predictions(NamedTuple):
    """Predictions of completion tokens, in float32 or wider, in nats, 0 where masked."""

    logp: Tensor  # [P, G, S] log-probability of each token
    entropy: Tensor  # [P, G, S] entropy of the distribution that predicts each token


class Transformer(Weights):
    """A decoder with GPT-2's names for its parts; weights.py fills and saves it."""

    def __init__(self, shape: ModelShape, seed: int | None = 0) -> None:
        """With a `seed` of None the weights are on `meta`, without memory."""
        super().__init__()
        self.shape = shape
        self.rope_bases = {*map(shape.rope_theta_of, range(shape.layers))} - {0}
        self.checkpointing = False
        self.compiled = False
        with torch.device("meta"):  # torch's own initialisation takes no time there
            self.wte = nn.Embedding(shape.vocab_size, shape.width)
            is_gpt2 = shape.family_row.is_gpt2
            self.wpe = nn.Embedding(shape.context, shape.width) if is_gpt2 else None
            self.h = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
            self.ln_f = make_norm(shape)
            self.head = None if shape.tied else Linear(shape.width, shape.vocab_size, bias=False)
        if seed is not None:
            self.initialise(torch.Generator().manual_seed(seed))

    def for_training(self, *, checkpointing: bool, compiled: bool) -> "Transformer":
        """A copy that shares the weights, and may recompute or compile blocks."""
        copied = self.sharing_weights()
        copied.checkpointing = checkpointing
        copied.compiled = compiled
        return copied

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, `[V, D]`."""
        return self.wte.weight if self.head is None else self.head.weight

    def forward_hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states `[N, D]` of tokens `ids [N]` at `positions [N]` in their texts."""
        # frozen embeddings may have a lower precision
        hidden = self.wte(ids).to(self.ln_f.weight.dtype)
        hidden = times(hidden, self.shape.embedding_scale)
        if self.wpe is not None:
            hidden = hidden + self.wpe(positions)
        rotations = {base: rotation(self.shape, base, positions) for base in self.rope_bases}
        # with checkpointing, the backward pass computes a block again; nothing in it is random
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for block in self.h:
            run = partial(recomputed, block) if self.checkpointing else block
            hidden = run(hidden, attend, rotations, self.compiled)
        return times(self.ln_f(hidden), 1 / self.shape.logits_divisor)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]`."""
        return linear(hidden, self.head_weight)

    def logits(self, ids: Tensor) -> Tensor:
        """A plain causal forward of right-padded rows, `[B, T]` int64 -> `[B, T, V]`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [x.unflatten(0, ids.shape).transpose(1, 2) for x in (q, k, v)]  # [B, H, T, E]
            attended = causal(self.shape.window_of(layer), *rows)
            return attended.transpose(1, 2).flatten(0, 1)

        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.forward_hidden(ids.flatten(), positions.flatten(), attend)
        return self.lm_head(hidden).unflatten(0, ids.shape)

    def forward(
        self, packing: Packing, temperature: float = 1.0, learn_entropy: bool = False
    ) -> Predictions:
        """Predictions, of logits / temperature; with `learn_entropy` the entropy has a gradient."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packing.attend(q, k, v, self.shape.window_of(layer))

        hidden = self.forward_hidden(packing.ids, packing.positions, attend)
        hidden = hidden.index_select(0, packing.sources)  # [M, D]
        logp, entropy = token_logprobs(
            hidden, self.head_weight, packing.targets, temperature, learn_entropy
        )
        return Predictions(
            logp=logp[packing.index].where(packing.mask, 0),
            entropy=entropy[packing.index].where(packing.mask, 0),
        )

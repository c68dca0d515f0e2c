"""GPT-2 on packed tokens.

It has GPT-2's pre-LN blocks, learned positions, tanh-GELU and tied output head, with one departure:
blocks take packed tokens `x [N, D]`, not `[batch, time, D]`, and call an *attend* function on
`(q, k, v)` that determines which tokens attend to which (packing.py for training, decoders.py for
decoding). So a training forward spends no linear layer on padding, and runs shared tokens once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .logprobs import at_least_fp32, token_logprobs
from .weights import load_gpt2, save_gpt2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v, each [N, H, D/H] -> [N, H, D/H]


class AttentionPattern(Protocol):
    """How packed tokens attend to each other, layer by layer; `forward_hidden` takes one."""

    def layer(self, number: int) -> Attend: ...


class LogprobPacking(AttentionPattern, Protocol):
    """What `Transformer.forward` needs in addition; packing.py builds it."""

    sources: Tensor  # [M] packed tokens whose next token is predicted
    targets: Tensor  # [M] that next token
    index: Tensor  # [P, G, S] into the M predictions
    mask: Tensor  # [P, G, S] bool


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of any number of texts, in any order, without padding."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, the position of each token in its own text

    def to(self, device: torch.device | str) -> "PackedTokens":
        return PackedTokens(self.ids.to(device), self.positions.to(device))


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine a Transformer's parameters. Raises ValueError if they do not fit."""

    vocab_size: int
    context: int = 256  # number of positions
    layers: int = 4
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % 2:
            raise ValueError(
                f"--width must be even and a multiple of --heads, got {self.width} and {self.heads}"
            )


class Causal:
    """Plain causal attention within rows `[B, T]`, packed row after row."""

    def __init__(self, batch: int, length: int) -> None:
        self.shape = (batch, length)

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D/H]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def attention(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend(q, k, v)`, always in float32 on a CPU.

    On a CPU, the backward pass of torch's attention was measured to take three times as long in
    bfloat16.
    """
    if q.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return attend(q, k, v)
    with torch.autocast("cpu", enabled=False):
        return attend(at_least_fp32(q), at_least_fp32(k), at_least_fp32(v))


class Attention(nn.Module):
    """The linear layers before and after attention; it has no forward, Block calls them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)


class MLP(nn.Module):
    """Width -> 4 * width -> width, with tanh-GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention = attention  # compile_blocks in accel.py replaces it with an uncompiled call
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.attn.c_attn(self.ln_1(x)).view(len(x), 3, self.heads, -1)
        x = x + self.attn.c_proj(self.attention(attend, *qkv.unbind(1)).flatten(1))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """A GPT-2 with Hugging Face's parameter names, so that weights.py only has to transpose."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        # set by accel.py for gradient checkpointing: runs a block, recomputed in backward
        self.checkpoint_blocks: Callable[..., Tensor] | None = None
        self.logprob_chunk = 0  # set by build.py: tokens whose logits exist at once; 0: all
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        # GPT-2's scheme: one standard deviation for all matrices, divided by sqrt(2 * layers) for
        # the projections into the residual stream; with two departures. Measured on the chess task
        # at width 128, the loss after 400 supervised steps is 37 nats per example with both, 75
        # with the first alone and 80 with neither.
        # 1. The standard deviation scales as 1/sqrt(width), and is GPT-2's 0.02 at width 768.
        shape = self.shape
        std = 0.02 * math.sqrt(768 / shape.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                into_residual = name.endswith("c_proj.weight")
                scale = 1 / math.sqrt(2 * shape.layers) if into_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
        # 2. The learned positions start as sinusoids. A fixed offset is then a rotation of the
        # position embedding, which makes copying from that offset easier to learn.
        frequencies = torch.logspace(0, -math.log10(2000), shape.width // 2)
        angles = torch.arange(shape.context)[:, None] * frequencies  # [T, D/2]
        self.wpe.weight.copy_(math.sqrt(2) * std * torch.cat([angles.sin(), angles.cos()], dim=1))

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Transformer":
        """A model from a GPT-2 safetensors file, or from a folder that holds one.

        Raises ValueError, with the path and the reason, if the weights do not fit.
        """
        sizes, state = load_gpt2(Path(path))
        try:
            model = cls(ModelShape(**sizes))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        model.load_state_dict(state)
        return model

    def trim_vocab(self, number: int) -> None:
        """Keep only the first `number` tokens, so that vocabulary padding is never sampled."""
        self.shape = replace(self.shape, vocab_size=number)
        self.wte = nn.Embedding.from_pretrained(
            self.wte.weight.detach()[:number].clone(), freeze=False
        )

    def save_pretrained(self, path: str | Path) -> None:
        """Write a safetensors file that `from_pretrained` and Hugging Face's GPT-2 read."""
        save_gpt2(self.state_dict(), Path(path), heads=self.shape.heads)

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def forward_hidden(self, tokens: PackedTokens, pattern: AttentionPattern) -> Tensor:
        """Final hidden states `[N, D]` of N packed tokens."""
        x = self.wte(tokens.ids) + self.wpe(tokens.positions)
        for number, block in enumerate(self.h):
            attend = pattern.layer(number)
            recompute = self.checkpoint_blocks if torch.is_grad_enabled() else None
            x = recompute(block, x, attend) if recompute else block(x, attend)
        return self.ln_f(x)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        return F.linear(hidden, self.wte.weight)

    def logits(self, ids: Tensor) -> Tensor:
        """Plain causal forward of right-padded rows: `[B, T]` int64 -> `[B, T, V]`."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        tokens = PackedTokens(ids.flatten(), positions.flatten())
        hidden = self.forward_hidden(tokens, Causal(*ids.shape))
        return self.lm_head(hidden).unflatten(0, ids.shape)

    def forward(
        self, tokens: PackedTokens, packing: LogprobPacking, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token, and the entropy of its distribution.

        The output head runs only on the M packed tokens that predict a completion token.

        Returns:
            Two tensors `[P, G, S]`, float32 or wider, in nats, 0 where masked. The entropy has
            no gradient.
        """
        hidden = self.forward_hidden(tokens, packing).index_select(0, packing.sources)
        logp, entropy = token_logprobs(
            hidden, self.wte.weight, packing.targets, temperature, self.logprob_chunk
        )
        zero = logp.new_zeros(())
        return (
            torch.where(packing.mask, logp[packing.index], zero),
            torch.where(packing.mask, entropy[packing.index], zero),
        )

"""A decoder-only transformer on packed tokens: GPT-2, Llama, Qwen and their relatives.

`ModelShape` says which variant of each part a model has; layers.py has the parts. What differs from
the textbook: blocks take packed tokens `x [N, D]`, not `[batch, time, D]`, and call an *attend*
function on `(q, k, v)` that determines which tokens attend to which (packing.py for training,
decoders.py for decoding). So a training forward spends no linear layer on padding, and runs shared
tokens once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .attention import Attend, Causal, Rotation, attention
from .families import read_shape
from .layers import INTO_RESIDUAL, MLPS, NORMS, PROJECTIONS
from .linear import Linear, linear
from .logprobs import token_logprobs
from .shape import ModelShape
from .weight_files import WeightFiles
from .weights import load_into, save_weights


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


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention = attention  # compile_blocks in accel.py replaces it with an uncompiled call
        self.ln_1 = NORMS[shape.norm](shape.width, shape.norm_eps)
        self.attn = PROJECTIONS[shape.projections](shape)
        self.ln_2 = NORMS[shape.norm](shape.width, shape.norm_eps)
        self.mlp = MLPS[shape.mlp](shape)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.attn.qkv(self.ln_1(x))
        x = x + self.attn.project(self.attention(attend, q, k, v))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """A decoder with GPT-2's names for its parts; families.py maps the names of other files."""

    def __init__(self, shape: ModelShape, seed: int | None = 0) -> None:
        """Random weights from `seed`; None leaves them uninitialised, for loading."""
        super().__init__()
        self.shape = shape
        # set by accel.py for gradient checkpointing: runs a block, recomputed in backward
        self.checkpoint_blocks: Callable[..., Tensor] | None = None
        self.logprob_chunk = 0  # set by build.py: tokens whose logits exist at once; 0: all
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe: nn.Embedding | None = (
            None if shape.rope_theta else nn.Embedding(shape.context, shape.width)
        )
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = NORMS[shape.norm](shape.width, shape.norm_eps)
        self.head = None if shape.tied else Linear(shape.width, shape.vocab_size, bias=False)
        if seed is not None:
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
                scale = 1 / math.sqrt(2 * shape.layers) if name.endswith(INTO_RESIDUAL) else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
        if self.wpe is None:
            return
        # 2. The learned positions start as sinusoids. A fixed offset is then a rotation of the
        # position embedding, which makes copying from that offset easier to learn.
        frequencies = torch.logspace(0, -math.log10(2000), shape.width // 2)
        angles = torch.arange(shape.context)[:, None] * frequencies  # [T, D/2]
        self.wpe.weight.copy_(math.sqrt(2) * std * torch.cat([angles.sin(), angles.cos()], dim=1))

    @classmethod
    def empty(cls, shape: ModelShape, device: torch.device | str = "cpu") -> "Transformer":
        """A model whose weights are uninitialised memory; on `meta`, without memory."""
        with torch.device("meta"):
            model = cls(shape, seed=None)
        return model.to_empty(device=device)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, matrices: torch.dtype | None = None
    ) -> "Transformer":
        """A model from a folder as Hugging Face writes it, or from a GPT-2's safetensors file.

        The families are those of families.py. Weights become float32, or matrices another type,
        one tensor after the other, so that the peak memory is the model's and that of its largest
        tensor.
        Raises ValueError, in one line with the path and the reasons, if the model does not fit.
        """
        found = WeightFiles.open(Path(path))
        shape, problems = read_shape(found)
        model = cls.empty(shape)
        for parameter in model.parameters():
            if matrices and parameter.dim() >= 2:
                parameter.data = torch.empty_like(parameter, dtype=matrices)
        load_into(model.state_dict(), found, shape, problems)
        return model

    def trim_vocab(self, number: int) -> None:
        """Keep only the first `number` tokens, so that vocabulary padding is never sampled."""
        self.shape = replace(self.shape, vocab_size=number)
        for part in (self.wte, self.head):
            if part is not None:
                part.weight = nn.Parameter(part.weight.detach()[:number].clone())

    def save_pretrained(self, path: str | Path) -> None:
        """Write a safetensors file that `from_pretrained` reads; a GPT-2's, Hugging Face's too."""
        save_weights(self.state_dict(), self.shape, Path(path))

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, `[V, D]`."""
        return self.wte.weight if self.head is None else self.head.weight

    def forward_hidden(self, tokens: PackedTokens, pattern: AttentionPattern) -> Tensor:
        """Final hidden states `[N, D]` of N packed tokens."""
        shape, x = self.shape, self.wte(tokens.ids)
        x = x.to(self.ln_f.weight.dtype)  # frozen embeddings may be in lower precision
        if self.wpe is not None:
            x = x + self.wpe(tokens.positions)
        else:
            rotation = Rotation.of(shape, tokens.positions, x.dtype)
        for number, block in enumerate(self.h):
            attend = pattern.layer(number)
            if shape.rope_theta and number not in shape.unrotated:
                attend = rotation.before(attend)
            recompute = self.checkpoint_blocks if torch.is_grad_enabled() else None
            x = recompute(block, x, attend) if recompute else block(x, attend)
        return self.ln_f(x)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        return linear(hidden, self.head_weight)

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
            hidden, self.head_weight, packing.targets, temperature, self.logprob_chunk
        )
        zero = logp.new_zeros(())
        return (
            torch.where(packing.mask, logp[packing.index], zero),
            torch.where(packing.mask, entropy[packing.index], zero),
        )

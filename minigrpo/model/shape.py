"""What determines a Transformer's function: sizes, and the variant of each part, as plain data.

The defaults are GPT-2's. hf.py reads the shape of an open model from its config.json.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..types import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies, for contexts longer than the original one.

    Wavelengths above `context / low_freq_factor` are multiplied by `factor`, those below
    `context / high_freq_factor` stay, and those in between are interpolated, where `context` is the
    original one. The names are those of config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes and variants of a decoder. A size of 0 follows from the others."""

    vocab_size: int
    context: int = 256  # number of positions
    layers: int = 4
    width: int = 128
    heads: int = 4
    family: str = "gpt2"  # a row of hf.py: how parameters are named in files
    kv_heads: int = 0  # grouped-query attention: query heads share these; 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    mlp_width: int = 0  # 0: 4 * width; of swiglu, 8 / 3 * width rounded up to a multiple of 8
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    projections: Literal["fused", "separate"] = "fused"  # of queries, keys and values
    mlp: Literal["gelu", "swiglu"] = "gelu"
    qkv_bias: bool = True
    out_bias: bool = True  # of the projection after attention
    mlp_bias: bool = True
    head_norm: bool = False  # normalise each head's query and key before they are rotated
    rope_theta: float = 0.0  # base of the rotary positions; 0: learned positions
    rope_scaling: RopeScaling | None = None
    unrotated: Sequence[int] = ()  # layers whose queries and keys are not rotated
    tied: bool = True  # the output head is the token embedding

    def __post_init__(self) -> None:
        # SwiGLU has three matrices: with 2 / 3 of GPT-2's width, as many weights (arXiv 2002.05202)
        mlp_width = 4 * self.width if self.mlp == "gelu" else 8 * math.ceil(self.width / 3)
        scaling = self.rope_scaling
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.width // self.heads,
            "mlp_width": self.mlp_width or mlp_width,
            # from a file, which holds plain types
            "unrotated": tuple(self.unrotated),
            "rope_scaling": RopeScaling(**scaling) if isinstance(scaling, dict) else scaling,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        sizes = [self.vocab_size, self.context, self.layers, self.width, self.heads, self.head_dim]
        fit = self.heads % self.kv_heads == 0
        if self.projections == "fused":
            fit = self.heads * self.head_dim == self.width
        # the halves of learned positions are sines and cosines, those of a rotated head are swapped
        even = (self.head_dim if self.rope_theta else self.width) % 2 == 0
        if min(sizes) < 1 or not (fit and even):
            raise ConfigError(f"no model has these sizes: {self}")

    @property
    def kv_width(self) -> int:
        """Numbers per token and layer in the keys, and as many in the values."""
        return self.kv_heads * self.head_dim

"""What determines a Transformer's function: sizes, and the variant of each part, as plain data.

The defaults are GPT-2's. families.py reads the shape of an open model from its config.json;
architectures.py makes that of a model from scratch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies, for contexts longer than the original one.

    Wavelengths above `original_context / low` are multiplied by `factor`, those below
    `original_context / high` stay, and those in between are interpolated.
    """

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes and variants of a decoder. Raises ValueError if they do not fit together.

    A size of 0 stands for the value that follows from the others.
    """

    vocab_size: int
    context: int = 256  # number of positions
    layers: int = 4
    width: int = 128
    heads: int = 4
    family: str = "gpt2"  # a row of families.py: how parameters are named in files
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
        for name in ("vocab_size", "context", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, least in (("norm_eps", 1e-30), ("rope_theta", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                what = "above 0" if least else "at least 0"
                raise ValueError(f"{name} must be a number {what}, got {getattr(self, name)}")
        if self.width % 2 or (not self.head_dim and self.width % self.heads):
            raise ValueError(
                f"--width must be even and a multiple of --heads, got {self.width} and {self.heads}"
            )
        scaling = self.rope_scaling
        # SwiGLU has three matrices: with 2 / 3 of GPT-2's width, as many weights (arXiv 2002.05202)
        mlp_width = 4 * self.width if self.mlp == "gelu" else 8 * math.ceil(self.width / 3)
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.width // self.heads,
            "mlp_width": self.mlp_width or mlp_width,
            "unrotated": tuple(self.unrotated),
            # from a checkpoint, which holds plain types
            "rope_scaling": RopeScaling(**scaling) if isinstance(scaling, dict) else scaling,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values"
            )
        if self.rope_theta and self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head size (--width / --heads), got {self.head_dim}"
            )

    @property
    def kv_width(self) -> int:
        """Numbers per token and layer in the keys, and as many in the values."""
        return self.kv_heads * self.head_dim

    @property
    def block_weights(self) -> int:
        """Weights of a block's linear layers, biases not counted."""
        attention = 2 * self.width * (self.heads * self.head_dim + self.kv_width)
        return attention + (2 if self.mlp == "gelu" else 3) * self.width * self.mlp_width

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        inner = self.mlp_width * (1 if self.mlp == "gelu" else 2)
        biases = (self.heads * self.head_dim + 2 * self.kv_width) * self.qkv_bias
        biases += self.width * self.out_bias + (inner + self.width) * self.mlp_bias
        norm = self.width * (2 if self.norm == "layer" else 1)
        block = self.block_weights + biases + 2 * norm + 2 * self.head_dim * self.head_norm
        embeddings = self.vocab_size * (1 if self.tied else 2)
        positions = 0 if self.rope_theta else self.context
        return self.layers * block + norm + (embeddings + positions) * self.width

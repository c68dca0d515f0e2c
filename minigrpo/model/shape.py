"""What determines a Transformer's function: its family and its sizes, as plain data."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from .families import FAMILIES, Family

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies, for contexts longer than the original one.

    Wavelengths above `context / low_freq_factor` are multiplied by `factor`, those below
    `context / high_freq_factor` stay, and those in between are interpolated, where `context` is the
    original one. The names are those of config.json.
    """

    factor: PositiveFinite
    low_freq_factor: PositiveFinite
    high_freq_factor: PositiveFinite
    original_max_position_embeddings: PositiveInt


@dataclass(frozen=True)
class ModelShape:
    """The family and the sizes of a decoder, with the types that pydantic demands of files (hf.py).

    GPT-2 has LayerNorm, learned positions, one projection for queries, keys and values, a GELU,
    and biases. The other families have RMSNorm, rotary positions, three projections and SwiGLU.
    """

    vocab_size: PositiveInt
    context: PositiveInt = 256  # number of positions
    layers: PositiveInt = 4
    width: PositiveInt = 128
    heads: PositiveInt = 8
    family: str = "gpt2"  # a row of FAMILIES
    kv_heads: NonNegativeInt = 0  # query heads share these; 0: as many as heads
    head_dim: NonNegativeInt = 0  # 0: width / heads
    mlp_width: NonNegativeInt = 0  # 0: 4 * width
    norm_eps: PositiveFinite = 1e-5
    rope_theta: FiniteFloat = 1e4  # base of the rotary positions
    local_rope_theta: FiniteFloat = 0.0  # in layers with a window; 0: the same
    rope_scaling: RopeScaling | None = None
    tied: bool = True  # the output head is the token embedding
    # biases that not all models of a family have
    attention_bias: bool = False  # of all four projections
    mlp_bias: bool = False  # of all three layers
    embedding_multiplier: FiniteFloat = 1.0
    attention_multiplier: FiniteFloat = 0.0  # of scores; 0: 1 / sqrt(attention_size)
    attention_size: NonNegativeInt = 0  # 0: head_dim
    residual_multiplier: FiniteFloat = 1.0  # of what attention and MLP add
    logits_divisor: PositiveFinite = 1.0
    window: NonNegativeInt = 0  # tokens that a layer sees, itself included; 0: all before it
    full_every: NonNegativeInt = 0  # every how many layers one has no window; 0: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    @property
    def kv_width(self) -> int:
        """Numbers per token and layer in the keys, and as many in the values."""
        return self.kv_heads * self.head_dim

    def window_of(self, layer: int) -> int:
        """The window of a layer; 0: none."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return 0 if is_full else self.window

    def rope_theta_of(self, layer: int) -> float:
        """The base of a layer's rotary positions; 0: it does not rotate."""
        every = self.kind.unrotated
        if self.kind.is_gpt2 or (every and (layer + 1) % every == 0):
            return 0.0
        return (self.window_of(layer) and self.local_rope_theta) or self.rope_theta

    @property
    def embedding_scale(self) -> float:
        return self.width**0.5 if self.kind.scales_embeddings else self.embedding_multiplier

    @property
    def query_scale(self) -> float:
        """A factor of queries; attention itself divides by the square root of head_dim."""
        if self.attention_multiplier:
            return self.attention_multiplier * self.head_dim**0.5
        return (self.head_dim / (self.attention_size or self.head_dim)) ** 0.5

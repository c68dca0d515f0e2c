"""The family and the sizes of a Transformer, which determine its function, as plain data."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from .families import FAMILIES, Family

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Size(NamedTuple):
    """What is known of a published model before its weights are read."""

    parameters: int
    context: int

    @classmethod
    def of(cls, model: Any) -> "Size":
        return cls(sum(x.numel() for x in model.parameters()), model.shape.context)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling of rotary frequencies, for contexts longer than the original one, L.

    Wavelengths above `L / low_freq_factor` are multiplied by `factor`, wavelengths below
    `L / high_freq_factor` stay, and those in between are interpolated.
    """

    factor: PositiveFinite
    low_freq_factor: PositiveFinite
    high_freq_factor: PositiveFinite
    original_max_position_embeddings: PositiveInt
    rope_type: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling (Peng et al., arXiv 2309.00071).

    Frequencies with fewer than `beta_slow` turns in the original context are divided by `factor`,
    those with more than `beta_fast` stay, and those in between are interpolated.
    """

    factor: PositiveFinite
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFinite = 32.0
    beta_slow: PositiveFinite = 1.0
    attention_factor: PositiveFinite = 1.0  # of what is rotated
    llama_4_scaling_beta: FiniteFloat = 0.0  # of queries beyond the original context: none are here
    rope_type: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al., arXiv 2402.13753), up to the original context."""

    short_factor: tuple[PositiveFinite, ...]  # divisors of the frequencies
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFinite = 1.0
    rope_type: Literal["longrope"] = "longrope"


RopeScaling = Annotated[Llama3Scaling | YarnScaling | LongRope, Field(discriminator="rope_type")]


@dataclass(frozen=True)
class Rope:
    theta: PositiveFinite = 1e4  # the base of the frequencies
    fraction: PositiveFinite = 1.0  # of each head, from its start; the rest is not rotated
    # the whole head is rotated, but only this fraction of its pairs by an angle that is not 0
    is_proportional: bool = False
    scaling: RopeScaling | None = None

    def rotated_dim(self, head_dim: int) -> int:
        return head_dim if self.is_proportional else int(head_dim * self.fraction)


@dataclass(frozen=True)
class AttentionShape:
    """A layer whose tokens attend to those before them."""

    mixer: Literal["attention"] = "attention"
    window: NonNegativeInt = 0  # tokens that a token sees, itself included; 0 means all before it
    rope: Rope | None = None  # None: positions are learned, or the layer has none


@dataclass(frozen=True)
class ShortConvShape:
    """A layer with a gated convolution along each text, as in LFM2."""

    mixer: Literal["short_conv"] = "short_conv"
    taps: PositiveInt = 3  # tokens that a token sees, itself included


@dataclass(frozen=True)
class GatedDeltaShape:
    """A layer with a gated delta rule, whose state is a matrix per head of values."""

    mixer: Literal["gated_delta"] = "gated_delta"
    key_heads: PositiveInt = 16
    value_heads: PositiveInt = 16  # a multiple of the key heads
    key_dim: PositiveInt = 128  # size of a head
    value_dim: PositiveInt = 128
    taps: PositiveInt = 4  # of the convolution before it


LayerShape = Annotated[
    AttentionShape | ShortConvShape | GatedDeltaShape, Field(discriminator="mixer")
]


@dataclass(frozen=True)
class ModelShape:
    """The family and the sizes of a decoder. hf.py checks the types of what it reads from files."""

    vocab_size: PositiveInt
    context: PositiveInt = 256  # number of positions
    layers: Annotated[tuple[LayerShape, ...], Field(min_length=1)] = (AttentionShape(),) * 4
    width: PositiveInt = 128
    heads: PositiveInt = 8
    family: str = "gpt2"  # a row of FAMILIES
    kv_heads: NonNegativeInt = 0  # heads of keys and values; 0 becomes `heads`
    head_dim: NonNegativeInt = 0  # size of a head; 0 becomes width / heads
    mlp_width: NonNegativeInt = 0  # hidden size of the MLP; 0 becomes 4 * width
    norm_eps: PositiveFinite = 1e-5
    tied: bool = True  # the output head is the token embedding
    attention_bias: bool = False  # all four projections have a bias
    mlp_bias: bool = False  # all layers of the MLP have a bias
    embedding_multiplier: FiniteFloat = 1.0
    attention_multiplier: FiniteFloat = 0.0  # factor of scores; 0 means 1 / sqrt(attention_size)
    attention_size: NonNegativeInt = 0  # 0 means head_dim
    residual_multiplier: FiniteFloat = 1.0  # factor of the outputs of attention and MLP
    logits_divisor: PositiveFinite = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)

    @property
    def family_row(self) -> Family:
        return FAMILIES[self.family]

    @property
    def kv_width(self) -> int:
        """The count of numbers per token and layer in the keys; the values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def attention_layers(self) -> dict[int, AttentionShape]:
        layers = enumerate(self.layers)
        return {number: layer for number, layer in layers if isinstance(layer, AttentionShape)}

    @property
    def embedding_scale(self) -> float:
        return self.width**0.5 if self.family_row.scales_embeddings else self.embedding_multiplier

    @property
    def query_scale(self) -> float:
        """The factor of queries, beside attention's own division by the square root of head_dim."""
        if self.attention_multiplier:
            return self.attention_multiplier * self.head_dim**0.5
        attention_size = self.attention_size or self.head_dim
        return (self.head_dim / attention_size) ** 0.5

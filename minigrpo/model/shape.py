"""What determines a Transformer's function: its family and its sizes, as plain data."""

from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt


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
    """The family and the sizes of a decoder, with the types that pydantic demands of files (hf.py).

    GPT-2 has LayerNorm, learned positions, one projection for queries, keys and values, a GELU,
    and biases. The other families have RMSNorm, rotary positions, three projections and SwiGLU; of
    their linear layers, those for queries, keys and values have biases in Qwen2.
    """

    vocab_size: PositiveInt
    context: PositiveInt = 256  # number of positions
    layers: PositiveInt = 4
    width: PositiveInt = 128
    heads: PositiveInt = 8
    family: str = "gpt2"  # a row of FAMILIES in hf.py
    kv_heads: NonNegativeInt = 0  # query heads share these; 0: as many as heads
    head_dim: NonNegativeInt = 0  # 0: width / heads
    mlp_width: NonNegativeInt = 0  # 0: 4 * width
    norm_eps: float = 1e-5
    rope_theta: float = 1e4  # base of the rotary positions
    rope_scaling: RopeScaling | None = None
    tied: bool = True  # the output head is the token embedding
    # biases where the family says nothing of them, see BIASES in hf.py
    attention_bias: bool = False  # of all four projections
    mlp_bias: bool = False  # of all three layers

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    @property
    def kv_width(self) -> int:
        """Numbers per token and layer in the keys, and as many in the values."""
        return self.kv_heads * self.head_dim

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys; every fourth of SmolLM3 does not."""
        return not self.is_gpt2 and (self.family != "smollm3" or (layer + 1) % 4 > 0)

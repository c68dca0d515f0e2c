"""Models made from scratch: what each --arch means, as the fields of `ModelShape`."""

from typing import TYPE_CHECKING, Any, Literal, Protocol

from .shape import ModelShape

_LLAMA = {
    "norm": "rms",
    "projections": "separate",
    "mlp": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
# a row of families.py -> the fields that differ from GPT-2's, which are ModelShape's defaults
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "norm_eps": 1e-6, "head_norm": True},
}
if TYPE_CHECKING:  # type checkers cannot evaluate the table
    ArchName = str
else:
    ArchName = Literal[tuple(ARCHITECTURES)]


class Sizes(Protocol):
    """The settings that a model from scratch is made with; `Config.model` has them."""

    @property
    def arch(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def context(self) -> int: ...


def groups_queries(arch: str) -> bool:
    """Whether several query heads may share keys and values."""
    return ARCHITECTURES[arch].get("projections") == "separate"


def shape_from_scratch(sizes: Sizes, vocab_size: int) -> ModelShape:
    """The shape of a model from scratch. Raises ValueError if the sizes do not fit together."""
    return ModelShape(
        vocab_size,
        context=sizes.context,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads if groups_queries(sizes.arch) else 0,
        family=sizes.arch,
        **ARCHITECTURES[sizes.arch],
    )

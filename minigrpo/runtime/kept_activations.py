"""Bytes that autograd keeps of a block until its backward pass.

They are counted part by part, as layers.py, linear.py and lora.py compute. tests/test_kept.py
compares them with what autograd saves, for each kind of norm, MLP, attention and precision.
"""

from dataclasses import dataclass

from torch import nn

from ..model.layers import SeparateAttention
from ..model.lora import LoRALinear
from ..model.merged_attention import KERNELS
from ..model.shape import ModelShape
from ..model.transformer import Block

FLOAT, LOW = 4, 2  # bytes of a number in float32, and in the precision of autocast


@dataclass(frozen=True)
class KeptByBlock:
    """Bytes that one block keeps."""

    per_token: float  # packed token
    per_query: float  # query; joined, a place in the padded rows that attention runs
    per_key: float  # key and its value; joined, a place in those rows

    @classmethod
    def of(cls, block: Block, shape: ModelShape, *, low: bool, device: str) -> "KeptByBlock":
        """`low`: under autocast. The block may be on torch's meta device.

        Where attention merges parts, it keeps packed tokens; where it joins them, padded rows.
        """
        on_cpu, merged = device == "cpu", device in KERNELS
        size = LOW if low else FLOAT
        norms = _norm(block.ln_1, shape.width, FLOAT) + _norm(block.ln_2, shape.width, FLOAT)
        if isinstance(block.attn, SeparateAttention) and shape.head_norm:
            norms += shape.heads * _norm(block.attn.q_norm, shape.head_dim, size)
            norms += shape.kv_heads * _norm(block.attn.k_norm, shape.head_dim, size)
        # GELU keeps its input; SwiGLU keeps the inputs of SiLU and of the product
        inner = (1 if shape.mlp == "gelu" else 3) * size * shape.mlp_width
        linears = _linears(block.attn, low=low) + _linears(block.mlp, low=low)
        # on a CPU, attention runs in float32; see `attention` in attention.py
        number = FLOAT if on_cpu else size
        # the query and the output; merged, the output is the input of the projection
        outputs = 2 - (merged and number == size and _keeps_input(_linear_layers(block.attn)[-1]))
        log_sum_exp = FLOAT * shape.heads
        return cls(
            per_token=norms + linears + inner,
            per_query=outputs * shape.heads * shape.head_dim * number + log_sum_exp,
            per_key=2 * shape.kv_width * number,
        )


def _norm(norm: nn.Module, width: int, size: int) -> float:
    """Bytes per normalised vector, whose numbers have `size` bytes."""
    if isinstance(norm, nn.LayerNorm):
        return width * size + 2 * FLOAT  # the input, its mean and its deviation
    # RMSNorm: the input in float32, its scale, and for the weight's gradient the normalised input
    trained = any(parameter.requires_grad for parameter in norm.parameters())
    return width * FLOAT + FLOAT + width * size * trained


def _linears(part: nn.Module, *, low: bool) -> float:
    """Bytes per token of the inputs of a part's linear layers. All but the last share an input."""
    *first, last = _linear_layers(part)
    size = LOW if low else FLOAT
    kept = [layer for layer in first if _keeps_input(layer)]
    # autocast makes a copy of a float32 input for each layer
    copies = len(kept) if low else min(1, len(kept))
    inputs = copies * first[0].in_features + last.in_features * _keeps_input(last)
    ranks = sum(len(layer.lora_A) for layer in (*first, last) if isinstance(layer, LoRALinear))
    return size * (inputs + ranks)


def _linear_layers(part: nn.Module) -> list[nn.Linear]:
    return [layer for layer in part.children() if isinstance(layer, nn.Linear)]


def _keeps_input(layer: nn.Linear) -> bool:
    """Whether the gradient of a weight needs the layer's input."""
    return isinstance(layer, LoRALinear) or layer.weight.requires_grad

"""Floating-point operations of a forward pass, for estimates and rooflines."""

from ..model.shape import ModelShape


def forward_flops(
    shape: ModelShape, *, tokens: float, attended: float, head_tokens: float
) -> float:
    """FLOPs of a forward over `tokens` tokens, each attending to `attended` tokens on average.

    2 per token and weight of a linear layer, and 4 * width per layer and (query, key) pair. Only
    `head_tokens` of the tokens go through the output head. A backward pass takes twice as many.
    """
    blocks, head = 12 * shape.layers * shape.width**2, shape.vocab_size * shape.width
    per_token = 2 * blocks + 4 * shape.layers * shape.width * attended
    return per_token * tokens + 2 * head * head_tokens

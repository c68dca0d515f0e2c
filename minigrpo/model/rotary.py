"""Rotary positions: queries and keys are rotated by angles that grow with their position."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from .logprobs import at_least_fp32
from .shape import ModelShape

Rotate = Callable[[Tensor], Tensor]  # [N, H, E] -> [N, H, E]
Rotations = Mapping[float, Rotate]  # by their base


def rotation(shape: ModelShape, theta: float, positions: Tensor) -> Rotate:
    """A function that rotates heads `[N, H, E]` by `positions [N]` (Su et al., arXiv 2104.09864).

    The first half of a head is rotated against the second half, as in Llama's files; in float32 or
    wider, whatever the model's precision.
    """
    angles = positions[:, None, None] * frequencies(shape, theta, positions.device)
    cos, sin = angles.cos(), angles.sin()  # [N, 1, E / 2]
    cos_of_both = torch.cat([cos, cos], dim=-1)  # [N, 1, E]
    sin_of_both = torch.cat([-sin, sin], dim=-1)

    def rotate(heads: Tensor) -> Tensor:
        wide = at_least_fp32(heads)
        swapped = wide.roll(wide.shape[-1] // 2, dims=-1)  # the halves
        return torch.addcmul(wide * cos_of_both, swapped, sin_of_both).to(heads.dtype)

    return rotate


@cache  # made in every forward, they would be copied to the device for every decoded token
def frequencies(shape: ModelShape, theta: float, device: torch.device) -> Tensor:
    """Rotary frequencies `[E / 2]` float32 of a base, in radians per position."""
    numbers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    plain = 1.0 / theta ** (numbers / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain.to(device)
    turns = scaling.original_max_position_embeddings * plain / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the plain frequency
    return (plain * share + plain / scaling.factor * (1 - share)).to(device)

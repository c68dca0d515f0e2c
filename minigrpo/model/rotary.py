"""Rotary positions: queries and keys are rotated by angles that grow with their position."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from .logprobs import at_least_fp32
from .shape import Rope

Rotate = Callable[[Tensor], Tensor]  # [N, H, E] -> [N, H, E]
Rotations = Mapping[Rope, Rotate]


def rotation(rope: Rope, head_dim: int, positions: Tensor) -> Rotate:
    """A function that rotates heads `[N, H, E]` by `positions [N]` (Su et al., arXiv 2104.09864).

    The first half of what is rotated turns against the second, as in Llama's files.
    """
    rotated_dim = int(head_dim * rope.fraction)
    angles = positions[:, None, None] * frequencies(rope, rotated_dim, positions.device)
    cos = angles.cos().repeat(1, 1, 2)  # [N, 1, E]
    sin_of_half = angles.sin()
    sin = torch.cat([-sin_of_half, sin_of_half], dim=-1)

    def rotate(heads: Tensor) -> Tensor:
        wide = at_least_fp32(heads[..., :rotated_dim])
        swapped = wide.roll(rotated_dim // 2, dims=-1)
        rotated = torch.addcmul(wide * cos, swapped, sin).to(heads.dtype)
        if rotated_dim == head_dim:
            return rotated
        return torch.cat([rotated, heads[..., rotated_dim:]], dim=-1)

    return rotate


@cache  # without it, each forward would copy them to the device, for every decoded token
def frequencies(rope: Rope, rotated_dim: int, device: torch.device) -> Tensor:
    """Rotary frequencies `[rotated_dim / 2]` float32, in radians per position."""
    numbers = torch.arange(0, rotated_dim, 2, dtype=torch.float32)
    plain = 1.0 / rope.theta ** (numbers / rotated_dim)
    scaling = rope.scaling
    if scaling is None:
        return plain.to(device)
    original_context = scaling.original_max_position_embeddings
    turns = original_context * plain / (2 * torch.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    plain_fraction = ((turns - low) / (high - low)).clamp(0, 1)
    scaled = plain / scaling.factor
    mixed = plain * plain_fraction + scaled * (1 - plain_fraction)
    return mixed.to(device)

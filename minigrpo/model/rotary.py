"""Rotary positions: queries and keys are rotated by angles that grow with their position."""

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from .linear import times
from .logprobs import at_least_fp32
from .shape import Llama3Scaling, LongRope, Rope, YarnScaling

Rotate = Callable[[Tensor], Tensor]  # [N, H, E] -> [N, H, E]
Rotations = Mapping[Rope, Rotate]


def rotation(rope: Rope, head_dim: int, positions: Tensor) -> Rotate:
    """A function that rotates heads `[N, H, E]` by `positions [N]` (Su et al., arXiv 2104.09864).

    The first half of what is rotated turns against the second, as in Llama's files.
    """
    rotated_dim = rope.rotated_dim(head_dim)
    angles = positions[:, None, None] * frequencies(rope, head_dim, positions.device)
    factor = getattr(rope.scaling, "attention_factor", 1.0)
    cos = times(angles.cos(), factor).repeat(1, 1, 2)  # [N, 1, E]
    sin_of_half = times(angles.sin(), factor)
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
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Rotary frequencies `[rotated size / 2]` float32, in radians per position."""
    size = rope.rotated_dim(head_dim)
    numbers = torch.arange(0, size, 2, dtype=torch.float32)
    plain = 1.0 / rope.theta ** (numbers / size)
    if rope.is_proportional:
        plain[int(size * rope.fraction) // 2 :] = 0.0
    match rope.scaling:
        case None:
            return plain.to(device)
        case LongRope(short_factor=divisors):
            return (plain / torch.tensor(divisors)).to(device)
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_position_embeddings * plain / (2 * torch.pi)
            low = scaling.low_freq_factor
            high = scaling.high_freq_factor
            plain_fraction = ((turns - low) / (high - low)).clamp(0, 1)
        case YarnScaling() as scaling:
            low, high = yarn_range(scaling, rope.theta, size)
            plain_fraction = 1 - ((numbers / 2 - low) / (high - low)).clamp(0, 1)
    scaled = plain / scaling.factor
    mixed = plain * plain_fraction + scaled * (1 - plain_fraction)
    return mixed.to(device)


def yarn_range(scaling: YarnScaling, theta: float, size: int) -> tuple[float, float]:
    """The numbers of the frequencies between which YaRN interpolates."""

    def number_with(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(number_with(scaling.beta_fast)), 0)
    high = min(math.ceil(number_with(scaling.beta_slow)), size - 1)
    return low, high + (0.001 if low == high else 0.0)

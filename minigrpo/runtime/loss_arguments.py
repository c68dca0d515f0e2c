"""Checks of what losses.py and others are given, so that a slip is one line, not a wrong result.

Each raises ValueError, which names the argument, what is allowed, and what it got. Nothing here
waits for a GPU: a tensor's values are looked at only if it is on the CPU.
"""

import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

# Rewards beyond this are summed and centred in float64, because float32 would round away the
# differences in a group. Smaller ones stay in float32.
FLOAT32_UP_TO = 64.0
LARGEST_REWARD = 1e100  # the square of a larger one may overflow, and its advantage would be 0
MAX_CHARS = 60  # of a value in a message
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = {  # of tensors -> what a message calls them, and their types
    "float": ("floating-point numbers", FLOATS),
    "real": ("real numbers", (*FLOATS, *WHOLE, torch.bool)),
    "bool": ("torch.bool", (torch.bool,)),
}


def choice(name: str, value: Any, allowed: Collection[str]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {_shown(value)}")


def number(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """Raise ValueError unless `value` is a finite number >= `least` and > `above`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and least <= value and above < value < math.inf):
        limit = f"at least {least:g}" if least > -math.inf else f"above {above:g}"
        raise ValueError(f"{name} must be a finite number {limit}, got {_shown(value)}")


def count(name: str, value: Any, *, may_be_tensor: bool = False) -> None:
    """Raise ValueError unless `value` is at least 1 and whole, or perhaps a tensor of one such."""
    if may_be_tensor and isinstance(value, Tensor) and value.numel() == 1:
        if value.dtype not in WHOLE or (value.device.type == "cpu" and not value >= 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {_shown(value)}")
        return
    whole(name, value, least=1)


def whole(name: str, value: Any, *, least: int) -> None:
    """Raise ValueError unless `value` is a whole number >= `least`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_whole and value >= least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {_shown(value)}")


def tensor(
    name: str,
    x: Any,
    shape: Sequence[int] | None = None,
    *,
    needed: bool = False,
    kind: Literal["float", "real", "bool"] = "float",
) -> None:
    """Raise ValueError unless `x` is a tensor of this shape, or None if it is not `needed`.

    A shape that only broadcasts would give a wrong loss.

    Args:
        shape: None for any.
        kind: a row of KINDS.
    """
    wanted = "" if shape is None else f" must have the shape {list(shape)}"
    if x is None:
        if needed:
            raise ValueError(f"{name}{wanted or ' must be a tensor'}, got None")
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {_shown(x)}")
    if shape is not None and x.shape != torch.Size(shape):
        raise ValueError(f"{name}{wanted}, got {list(x.shape)}")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got {x.layout}")
    numbers, types = KINDS[kind]
    if x.dtype not in types:
        raise ValueError(f"{name} must be a tensor of {numbers}, got {x.dtype}")


def rewards(x: Any, *, may_be_negative: bool = True) -> None:
    """Raise ValueError unless `x` is a tensor `[..., G]` of finite numbers, with groups."""
    tensor("rewards", x, needed=True, kind="real")
    if not x.dim() or x.shape[-1] < 2:
        raise ValueError(f"--group-size must be at least 2, got {x.shape[-1:].numel()}")
    if not bool((fine := x.double().abs() <= LARGEST_REWARD).all()):
        raise ValueError(
            f"rewards must be finite, at most {LARGEST_REWARD:g}, got {x[~fine][0].item()}"
        )
    if not may_be_negative and bool((negative := x.double() < 0).any()):
        raise ValueError(
            "--scale mean divides by the mean reward of a group, so no reward may be negative, got "
            f"{x[negative][0].item():g}; group, batch and none allow it"
        )


def mask(x: Any, shape: Sequence[int] | None = None) -> None:
    """Raise ValueError unless `x` is a tensor `[..., S]` of bool."""
    tensor("mask", x, shape, needed=True, kind="bool")
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"mask must be [..., S] with at least one column, got {list(x.shape)}")


def instance(name: str, value: Any, wanted: type) -> None:
    """Raise ValueError unless `value` is of this class."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} must be a {wanted.__name__}, got {_shown(value)}")


def batch(logp: Any, mask: Any, advantages: Any, needs_group: bool) -> None:
    """Raise ValueError unless log-probs `[..., S]`, mask and advantages `[...]` fit each other."""
    tensor("logp", logp, needed=True)
    if not logp.dim() or not logp.shape[-1]:
        raise ValueError(f"logp must be [..., S] with at least one column, got {list(logp.shape)}")
    tensor("mask", mask, logp.shape, needed=True, kind="bool")
    tensor("advantages", advantages, logp.shape[:-1], needed=needs_group, kind="real")


def clip(low: Any, high: Any, cap: Any) -> None:
    """Raise ValueError for a distance of the clip from 1, or a cap on the ratio, that cannot be."""
    number("clip_low", low, least=0)
    number("clip_high", high, least=0)
    if cap is not None:
        number("ratio_cap", cap, above=0)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_CHARS else f"{type(value).__name__} {text[:MAX_CHARS]}..."

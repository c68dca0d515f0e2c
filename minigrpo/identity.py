"""Digests of contents: short texts that are equal in every process and on every machine.

A resume, and the processes of a run, compare them to see whether rows, functions and weights are
the same. Python's own `repr` and `hash` depend on addresses, and the order of a set is random.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def digest(value: object) -> str:
    """A text that is equal for values with equal contents at any depth: copies of an example."""
    hashed = sha256()
    for item in value if isinstance(value, list | tuple) else [value]:
        hashed.update(text(item).encode() + b"\n")  # all rows at once would be too large
    return hashed.hexdigest()[:16]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A text that is equal for equal weights on any device: sums of integers have no rounding."""
    hashed = sha256()
    for name, tensor in sorted(tensors.items()):
        rows = torch.atleast_1d(tensor.detach().contiguous()).unsqueeze(-1).flatten(1)
        # neighbours are read as one integer of up to 64 bits
        size = math.gcd(8, rows.shape[1] * rows.element_size())
        sums = rows.view(INTEGERS[size]).sum(1, dtype=torch.int64)
        hashed.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        hashed.update(sums.cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def record_checksum(known: dict[str, str], name: str, weights: Mapping[str, Tensor]) -> None:
    """Take the checksum of weights that are not in checkpoints: a resume loads them again.

    Raises ConfigError if other weights are known under this name, such as those of the start.
    """
    found = checksum(weights)
    if known.setdefault(f"weights of {name}", found) != found:
        raise ConfigError(f"{name}: its weights are not those that the run began with")


def text(value: object) -> str:
    """A value as JSON, or "" for one that contains itself, or has keys that are not texts."""
    try:
        return json.dumps(value, sort_keys=True, default=with_type)
    except (TypeError, ValueError, RecursionError):
        return ""


def with_type(value: object) -> object:
    """The type and the contents of a value that JSON has no form for."""
    name = type(value).__qualname__
    try:
        return [name, contents(value)]
    except Exception:  # the value's own code takes it apart, and may raise any error
        return [name]


def contents(value: Any) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(text, value))
    if isinstance(value, bytes | bytearray):
        return sha256(value).hexdigest()
    if isinstance(value, Tensor):
        return checksum({f"{[*value.shape]}": value.detach().flatten()})
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        compared = [field.name for field in fields(value) if field.compare]
        return {name: getattr(value, name) for name in compared}
    return value.__reduce_ex__(4)  # the state that copies and pickles are made from

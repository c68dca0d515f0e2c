"""Digests of contents: short texts that are equal in every process and on every machine.

A resume, and the processes of a run, compare them to see whether rows, functions and weights are
the same. Python's own `repr` and `hash` depend on addresses, and the order of a set is random.
"""

import copyreg
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from hashlib import sha256
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .errors import ConfigError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def digest(value: object) -> str:
    """A text that is equal for values with equal contents, such as copies of an example."""
    return Contents(value).digest


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


def _hashed(contents: bytes | bytearray) -> str:
    return sha256(contents).hexdigest()[:16]


class Contents:
    """What is in a value at any depth: data, objects, and the names of functions and classes."""

    def __init__(self, value: object) -> None:
        self.unread = set[str]()  # types of the objects that cannot be read, such as a lock
        # id -> (object, its digest); the object is kept so that no other one gets its id
        self.digests: dict[int, tuple[object, str]] = {}
        self.json = json.JSONEncoder(sort_keys=True, default=self.by_contents)
        self.digest = self.of(value)

    def of(self, value: object) -> str:
        """The digest of a value; each object inside is read once."""
        if type(value) not in (list, tuple):  # the text of a long list of rows would be large
            # JSON has no form for some values, such as a dict whose keys are not texts
            with suppress(TypeError, ValueError, RecursionError):
                return _hashed(self.json.encode(value).encode())
        return self.by_contents(value)

    def by_contents(self, value: object) -> str:
        """The digest of a list, or of a value that JSON has no form for."""
        value_type = type(value)
        if id(value) not in self.digests:
            self.digests[id(value)] = value, "inside itself"
            try:
                contents = self.contents(value)
            except Exception:  # the value's own code takes it apart, and may raise any error
                self.unread.add(value_type.__qualname__)
                contents = None
            written = self.json.encode([self.of(value_type), contents])
            self.digests[id(value)] = value, _hashed(written.encode())
        _, found = self.digests[id(value)]
        return found

    def contents(self, value: Any) -> object:
        """The contents of a value: texts, numbers, and digests of other values."""
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(map(self.of, value))
        if isinstance(value, dict):
            return sorted([self.of(key), self.of(item)] for key, item in value.items())
        if is_dataclass(value) and not isinstance(value, type):
            compared = [field.name for field in fields(value) if field.compare]
            return self.of({name: getattr(value, name) for name in compared})
        if isinstance(value, bytes | bytearray):
            return _hashed(value)
        if isinstance(value, Tensor):
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return [str(value.dtype), [*value.shape], _hashed(numbers.numpy().tobytes())]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [value.dtype.str, [*value.shape], _hashed(value.tobytes())]
        if isinstance(value, nn.Module):
            return checksum(value.state_dict())
        if isinstance(value, type | FunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        return self.of_object(value)

    def of_object(self, value: object) -> object:
        """The state that copies and pickles of an object are made from."""
        reduce = copyreg.dispatch_table.get(type(value))  # a compiled regex has one
        state = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(state, str):  # the name of a global, such as a function with a cache
            return state
        contents = [[*each] if isinstance(each, Iterator) else each for each in state]
        return [self.of(each) for each in contents]

"""What contents are, as short texts that are equal in every process and on every machine.

By them a resume, and the processes of a run, know whether rows, functions and weights are the same.
Python's own `repr` and `hash` do not tell: they have addresses, and sets have an order by chance.
"""

import copyreg
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .userfiles import INSTALLED

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Contents(NamedTuple):
    digest: str  # equal for values that say the same
    unread: frozenset[str]  # the types of what is inside, but cannot be read, such as a lock


def contents_of(value: object) -> Contents:
    """What any value says, at any depth: data, objects, and the code of users' functions."""
    reader = _Reader()
    found = reader.digest(value)
    return Contents(found, frozenset(reader.unread))


def digest(value: object) -> str:
    """Equal for values that say the same, such as examples that ask the same."""
    return contents_of(value).digest


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Equal for equal weights, on any device: sums of integers are exact in any order."""
    found = sha256()
    for name, tensor in sorted(tensors.items()):
        rows = torch.atleast_1d(tensor.detach().contiguous()).unsqueeze(-1).flatten(1)
        # neighbours are read as one integer of up to 64 bits
        size = math.gcd(8, rows.shape[1] * rows.element_size())
        sums = rows.view(INTEGERS[size]).sum(1, dtype=torch.int64)
        found.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        found.update(sums.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _hashed(contents: bytes | bytearray) -> str:
    return sha256(contents).hexdigest()[:16]


class _Reader:
    """Reads a value, and the objects inside it once each."""

    def __init__(self) -> None:
        self.unread = set[str]()
        # digests by id, with the objects: another one could get the id of an object that is gone
        self.digests: dict[int, tuple[object, str]] = {}
        self.json = json.JSONEncoder(sort_keys=True, default=self.by_parts)

    def digest(self, value: object) -> str:
        if type(value) not in (list, tuple):  # item by item: the text of all rows may be large
            with suppress(TypeError, ValueError, RecursionError):
                return _hashed(self.json.encode(value).encode())
        return self.by_parts(value)  # such as a dict whose keys are no texts, or a list in itself

    def by_parts(self, value: object) -> str:
        """The digest of an object, or of a list or dict that JSON has no form for."""
        kind = type(value)
        if kind is not type:
            # before the object: which of a set's comes first is chance, and its class may hold it
            self.digest(kind)
        if id(value) not in self.digests:
            self.digests[id(value)] = value, "inside itself"
            try:
                parts = self.parts(value)
            except Exception:  # of code of others, which takes a value apart
                self.unread.add(type(value).__qualname__)
                parts = None
            written = self.json.encode([self.digest(kind), parts])
            self.digests[id(value)] = value, _hashed(written.encode())
        return self.digests[id(value)][1]

    def parts(self, value: Any) -> object:
        """What a value consists of: texts, numbers, and digests of other values."""
        if isinstance(value, list | tuple):
            return [self.digest(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(map(self.digest, value))
        if isinstance(value, dict):
            return sorted([self.digest(key), self.digest(item)] for key, item in value.items())
        if is_dataclass(value) and not isinstance(value, type):
            return self.digest({x.name: getattr(value, x.name) for x in fields(value) if x.compare})
        if isinstance(value, bytes | bytearray):
            return _hashed(value)
        if isinstance(value, Tensor):
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return [str(value.dtype), [*value.shape], _hashed(numbers.numpy().tobytes())]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [value.dtype.str, [*value.shape], _hashed(value.tobytes())]
        if isinstance(value, nn.Module):
            return checksum(value.state_dict())
        if isinstance(value, CodeType):
            return [value.co_code.hex(), self.digest(value.co_consts), *value.co_names]
        if isinstance(value, FunctionType):
            return self.of_function(value)
        if isinstance(value, type):
            return self.of_class(value)
        return self.of_object(value)

    def of_function(self, function: FunctionType) -> object:
        """A function's code, and what it finds outside: default arguments, a closure, globals."""
        if is_installed(function):
            return f"{function.__module__}.{function.__qualname__}"
        known = function.__globals__
        # other globals, such as a client or a table, may change as a run goes on
        kinds = (FunctionType, type, str, int, float)
        names = {name for name in _names(function.__code__) if isinstance(known.get(name), kinds)}
        outside = (
            function.__defaults__,
            function.__kwdefaults__,
            [cell.cell_contents for cell in function.__closure__ or ()],
            {name: known[name] for name in names},
        )
        return [function.__qualname__, *map(self.digest, (function.__code__, *outside))]

    def of_class(self, kind: type) -> object:
        """The name of a class; of a user's class also its attributes and functions."""
        if is_installed(kind):
            return f"{kind.__module__}.{kind.__qualname__}"
        members = dict[str, object]()
        for name, member in vars(kind).items():
            for wrapped in ("__func__", "fget", "func"):  # of a static method, a property, ...
                member = getattr(member, wrapped, member)
            if isinstance(member, FunctionType) or not name.startswith("_"):
                members[name] = member
        return [kind.__qualname__, self.digest(kind.__bases__), self.digest(members)]

    def of_object(self, value: object) -> object:
        """What copies and pickles of it would be made from."""
        registered = copyreg.dispatch_table.get(type(value))  # such as for a compiled regex
        state = registered(value) if registered else value.__reduce_ex__(4)
        if isinstance(state, str):  # the name of a global, such as of a function with a cache
            return [state, self.digest(getattr(value, "__wrapped__", None))]
        return [self.digest([*part] if isinstance(part, Iterator) else part) for part in state]


def _names(code: CodeType) -> Iterator[str]:
    """The names that code and the functions inside it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def is_installed(named: Any) -> bool:
    """Whether a function or class is Python's, a package's or this one's: a name tells it all."""
    name = named.__module__ or "builtins"
    if name == "__main__":  # a debugger may be the file that was started
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in sys.stdlib_module_names or file.startswith(INSTALLED)

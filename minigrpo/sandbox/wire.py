"""Messages between the processes of the sandbox: frames of JSON, with plain values inside.

A plain value is a number, a text, bytes, or a list, tuple, set, dict ... of plain values. It
crosses as a copy and keeps its type. JSON is safe to read from a process that is not trusted;
pickle and marshal are not.
"""

import importlib
import itertools
import json
import os
import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

LARGEST = 8 * 2**20  # bytes of a message
MOST_ITEMS = 10_000  # that cross of an iterator, which may be endless
LONGEST_RANGE = 10**6  # a test that goes through a longer one may not end in time
SMALL = 2**63  # whole numbers below this are written as JSON's
HEADER = struct.Struct("<I")
# what a candidate cannot reach; a worker's first message lists which of these hold
NETWORK, PROCESSES, FILES = "network", "processes", "files"


def send(fd: int, message: Any) -> None:
    """Write a frame. Raises ValueError if it is too large, OSError if nobody reads it."""
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise ValueError(f"a message of {len(data)} bytes")
    data = HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> Any:
    """Read a frame. Raises EOFError if there is none, ValueError if it is malformed."""
    (size,) = HEADER.unpack(_read(fd, HEADER.size))
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read(fd, size))


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Form(NamedTuple):
    """How a type that JSON does not have is written: as `{name: payload}`."""

    kind: type
    payload: Callable[[Any], Any]  # a value -> plain values
    make: Callable[[Any], Any]  # these -> the value


def _range(parts: list[int]) -> range:
    if len(found := range(*parts)) > LONGEST_RANGE:
        raise ValueError(f"a range of {len(found)} numbers")
    return found


def _pairs(mapping: dict[Any, Any]) -> list[list[Any]]:
    return [list(pair) for pair in mapping.items()]


FORMS: dict[str, Form] = {
    "int": Form(int, hex, lambda digits: int(digits, 16)),
    "complex": Form(complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "bytes": Form(bytes, bytes.hex, bytes.fromhex),
    "bytearray": Form(bytearray, bytearray.hex, bytearray.fromhex),
    "tuple": Form(tuple, list, tuple),
    "set": Form(set, list, set),
    "frozenset": Form(frozenset, list, frozenset),
    "deque": Form(deque, list, deque),
    # two of them are equal in the same order only; before dict, from which it is derived
    "OrderedDict": Form(OrderedDict, _pairs, OrderedDict),
    "dict": Form(dict, _pairs, dict),
    # what a test compares with a set, or goes through
    "keys": Form(type({}.keys()), list, lambda keys: dict.fromkeys(keys).keys()),
    "values": Form(type({}.values()), list, lambda values: dict(enumerate(values)).values()),
    "items": Form(type({}.items()), lambda x: list(map(list, x)), lambda x: dict(x).items()),
    "array": Form(array, lambda a: [a.typecode, list(a)], lambda parts: array(*parts)),
    "range": Form(range, lambda r: [r.start, r.stop, r.step], _range),
    "Fraction": Form(Fraction, lambda q: [q.numerator, q.denominator], lambda q: Fraction(*q)),
    "Decimal": Form(Decimal, str, Decimal),
    "datetime": Form(datetime, datetime.isoformat, datetime.fromisoformat),  # before date, its base
    "date": Form(date, date.isoformat, date.fromisoformat),
    "time": Form(time, time.isoformat, time.fromisoformat),
    "timedelta": Form(
        timedelta, lambda t: [t.days, t.seconds, t.microseconds], lambda parts: timedelta(*parts)
    ),
}
NAMES = {form.kind: name for name, form in FORMS.items()}
# a value of a subclass (a named tuple, a Counter) crosses as its base
NO_BASES = {"int", "keys", "values", "items", "array"}  # "int" comes first; the others make no copy
BASES = (
    int,
    float,
    str,
    *(form.kind for name, form in FORMS.items() if name not in NO_BASES),
    list,
)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON; `refer` writes what is not plain.

    Raises RecursionError for a value that contains itself, and whatever a hostile value raises.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and -SMALL < value < SMALL):
        return value
    if kind is list:
        return [encode(item, refer) for item in value]
    if kind in NAMES:
        return {NAMES[kind]: encode(FORMS[NAMES[kind]].payload(value), refer)}
    for base in BASES:
        if isinstance(value, base):
            return encode(base(value), refer)
    if hasattr(kind, "__next__"):
        items = list(itertools.islice(value, MOST_ITEMS + 1))
        return {"iterator": [encode(items[:MOST_ITEMS], refer), len(items) > MOST_ITEMS]}
    return refer(value)


def find(module: str, path: str) -> Any:
    """What a module of the library has under a path such as `str.upper`; None for nothing."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _first(items: list[Any]) -> Iterator[Any]:
    """The first items of an iterator. Raises ValueError after them: a test sees no shorter one."""
    yield from items
    raise ValueError(f"an iterator of more than {MOST_ITEMS} items")


def decode(message: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Return the value that `encode` wrote; `resolve(name, payload)` reads what is not plain.

    Raises an error of some kind for a message that `encode` does not write.
    """
    if isinstance(message, list):
        return [decode(item, resolve) for item in message]
    if not isinstance(message, dict):
        return message
    ((name, payload),) = message.items()
    if name in FORMS:
        return FORMS[name].make(decode(payload, resolve))
    if name == "iterator":
        items, has_more = payload
        found: list[Any] = decode(items, resolve)
        return _first(found) if has_more is True else iter(found)
    return resolve(name, payload)

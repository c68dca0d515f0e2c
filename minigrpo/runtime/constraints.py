"""Groups of settings, which check their values on construction, and the limits of numbers.

A limit is part of a field's annotation, as in `Annotated[int, AtLeast(1)]`.
"""

import math
import numbers
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .flags import ConfigError, flag, shown

UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True)
class AtLeast:
    """value >= low."""

    low: float

    def allows(self, value: float) -> bool:
        return value >= self.low

    def __str__(self) -> str:
        return f"at least {self.low}"


@dataclass(frozen=True)
class Above:
    """value > low."""

    low: float

    def allows(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f"a number above {self.low}"


@dataclass(frozen=True)
class AtMost:
    """value <= high."""

    high: float

    def allows(self, value: float) -> bool:
        return value <= self.high

    def __str__(self) -> str:
        return f"at most {self.high}"


@dataclass(frozen=True)
class SeveralLines:
    """A text that may have line breaks and tabs."""


CONSTRAINTS = (AtLeast, Above, AtMost)


@dataclass(frozen=True)
class Group:
    """A group of settings; it checks its values on construction."""

    def __post_init__(self) -> None:
        """Raises ConfigError unless every value satisfies its annotation."""
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            hint, extras = hints[field.name], list[Any]()
            if typing.get_origin(hint) is typing.Annotated:
                hint, *extras = typing.get_args(hint)
            name = next((x.name for x in extras if getattr(x, "name", None)), field.name)
            value = _plain(getattr(self, field.name), hint)
            object.__setattr__(self, field.name, value)
            _check_type(name, value, hint, several_lines=SeveralLines() in extras)
            if isinstance(value, int | float):
                _check_range(name, value, [x for x in extras if isinstance(x, CONSTRAINTS)], hint)


def _plain(value: Any, hint: Any) -> Any:
    """A number of another library, such as NumPy's, as Python's own if the hint allows that.

    Only those can be written into config.toml. Any other value stays, to be checked.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    if isinstance(value, bool | int) or type(value) is float:
        return value
    for kind, numbers_like in ((int, numbers.Integral), (float, numbers.Real)):
        if kind in options and isinstance(value, numbers_like):
            try:
                return kind(typing.cast(Any, value))
            except (OverflowError, ValueError):
                return value
    return value


def _check_type(name: str, value: Any, hint: Any, *, several_lines: bool) -> None:
    """Raise ConfigError unless a value has the annotated type: plain, a Literal, or None."""
    allowed: list[str] = []
    for option in typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,):
        choices = typing.get_args(option)
        exact = type(value) is option or (option is float and type(value) is int)
        if value in choices if choices else exact:
            text = value if isinstance(value, str) else ""
            if several_lines:
                text = text.replace("\n", "").replace("\t", "")
            if not text.isprintable():  # a line break, a NUL byte, or bytes that are not UTF-8
                raise ConfigError(f"{flag(name)} must be printable text, got {shown(value)}")
            return
        allowed += choices or ([option.__name__] if option is not type(None) else [])
    raise ConfigError(f"{flag(name)} must be {' or '.join(allowed)}, got {shown(value)}")


def _check_range(name: str, value: float, limits: Sequence[Any], hint: Any) -> None:
    """Raise ConfigError unless a number is finite and within all of its limits."""
    try:
        finite = hint is int or math.isfinite(value)
    except OverflowError:  # an integer for a float that is too large to be one
        finite = False
    if not finite or not all(limit.allows(value) for limit in limits):
        words = [*map(str, limits), *([] if finite else ["finite"])]
        raise ConfigError(f"{flag(name)} must be {' and '.join(words)}, got {shown(value)}")

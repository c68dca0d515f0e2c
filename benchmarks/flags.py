"""What the flags of all benchmarks have in common: limits, and the command that sets them."""

import shlex
import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any

from minigrpo.runtime.constraints import CONSTRAINTS, AtLeast
from minigrpo.runtime.flags import ConfigError, flag

Positive = Annotated[int, AtLeast(1)]
PositiveOrZero = Annotated[int, AtLeast(0)]
UNRECORDED = ("json", "out_dir")  # where the figures go does not change them


@dataclass(frozen=True)
class BenchmarkFlags:
    """Base class of the benchmarks' flags. A field's annotation states its limits."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value outside its limits, and for an empty list of values.

        The limits of a tuple hold for each of its values.
        """
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value = getattr(self, field.name)
            if value == () != field.default:
                raise ConfigError(f"{flag(field.name)} needs at least one value")
            limits = [x for x in getattr(hints[field.name], "__metadata__", ()) if _limits(x)]
            for one in value if isinstance(value, tuple) else (value,):
                for limit in limits if one is not None else ():
                    if not limit.allows(one):
                        raise ConfigError(f"{flag(field.name)} must be {limit}, got {one}")

    def command(self) -> str:
        """The command that measures with these flags."""
        words = ["python", "benchmark.py", type(self).__name__.lower()]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in UNRECORDED:
                words += _words(field.name, value)
        return shlex.join(words)


def _limits(x: Any) -> bool:
    return isinstance(x, CONSTRAINTS)


def _words(name: str, value: Any) -> list[str]:
    """A flag as it is typed. --config is the one flag that is repeated for several values."""
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    if isinstance(value, tuple) and name == "config":
        return [word for one in value for word in (flag(name), str(one))]
    return [flag(name), *map(str, value if isinstance(value, tuple) else (value,))]

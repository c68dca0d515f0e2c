"""Old names and values of settings, still accepted in flags, TOML files and checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .flags import ConfigError


@dataclass(frozen=True)
class Renamed:
    """The current name of a setting, and the conversion of values given under the old name."""

    name: str
    value: Callable[[Any], Any] = lambda value: value
    kinds: tuple[type, ...] = ()  # types of the old values; (): those of the current ones


def _one_less(window: Any) -> Any:
    """A draft window counted the last token too. What is no whole number stays, to be refused."""
    return window - 1 if type(window) is int else window


def _auto_or_none(on: Any) -> Any:
    """Proposals were on or off. What is neither stays, to be refused."""
    return {True: "auto", False: "none"}[on] if type(on) is bool else on


NAMES = {
    "layout": Renamed("packing"),
    "draft_answers": Renamed("speculate", _auto_or_none, (bool,)),
    "speculative_decoding": Renamed("speculate", _auto_or_none, (bool,)),
    "draft_window": Renamed("num_speculative_tokens", _one_less),
    "skip_dead_groups": Renamed("skip_zero_variance_groups"),
    "resample_dead_groups": Renamed("dynamic_sampling"),
}
VALUES = {
    "packing": {"shared": "shared-prompt", "tree": "prefix-tree"},
    "task": {"policy": "best-move", "chess-env+policy": "chess-env+best-move"},
}


def modern(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by flat name, with old names and values replaced by current ones.

    Raises ConfigError if a setting is given under its old and under its current name.
    """
    out: dict[str, Any] = {}
    for name, value in settings.items():
        now = NAMES.get(name, Renamed(name))
        if now.name in out:
            raise ConfigError(f"{now.name} is set twice, the second time as {name}")
        out[now.name] = _modern_value(now, value)
    return out


def _modern_value(now: Renamed, value: Any) -> Any:
    value = now.value(value)
    return VALUES.get(now.name, {}).get(value, value) if isinstance(value, str) else value

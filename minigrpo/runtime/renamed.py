"""Old names and values of settings, still accepted in flags, TOML files and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .flags import flag


@dataclass(frozen=True)
class Renamed:
    """The current name of a setting, and the conversion of values given under the old name."""

    name: str
    value: Callable[[Any], Any] = lambda value: value


def _one_less(window: Any) -> Any:
    """A draft window counted the last token too. What is no whole number stays, to be refused."""
    return window - 1 if type(window) is int else window


NAMES = {
    "layout": Renamed("packing"),
    "draft_answers": Renamed("speculative_decoding"),
    "draft_window": Renamed("num_speculative_tokens", _one_less),
    "skip_dead_groups": Renamed("skip_zero_variance_groups"),
    "resample_dead_groups": Renamed("dynamic_sampling"),
}
VALUES = {
    "packing": {"shared": "shared-prompt", "tree": "prefix-tree"},
    "task": {"policy": "best-move", "chess-env+policy": "chess-env+best-move"},
}


def modern(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by flat name, with old names and values replaced by current ones."""
    out = {}
    for name, value in settings.items():
        now = NAMES.get(name, Renamed(name))
        out[now.name] = _modern_value(now, value)
    return out


def modern_argv(argv: Sequence[str]) -> list[str]:
    """The same for a command line: `--old value`, `--old=value`, `--no-old`."""
    out: list[str] = []
    last: Renamed | None = None  # the flag whose value may come next
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            bare = name.removeprefix("--").replace("-", "_")
            no = "no_" if bare.removeprefix("no_") in NAMES and bare.startswith("no_") else ""
            last = NAMES.get(bare.removeprefix(no), Renamed(bare.removeprefix(no)))
            out.append(flag(no + last.name) + equals + (_word(last, value) if equals else ""))
        else:
            out.append(_word(last, word) if last else word)
            last = None
    return out


def _word(now: Renamed, word: str) -> str:
    return str(_modern_value(now, int(word) if word.isdecimal() else word))


def _modern_value(now: Renamed, value: Any) -> Any:
    value = now.value(value)
    return VALUES.get(now.name, {}).get(value, value) if isinstance(value, str) else value

"""The machinery under Config: groups of settings, checked on construction, from TOML and flags.

A config is a dataclass of groups, and a group is a dataclass of plain fields. In Python a setting
is `config.sampling.group_size`; its flag is `--group-size`, without the group. The flag of a
field `name` is the name of its group: `config.loss.name` is `--loss`. Constraints are part of a
field's annotation, as in `Annotated[int, AtLeast(1)]`.
"""

import argparse
import json
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import tyro

from .flags import ConfigError, did_you_mean, exit_with, flag, parse
from .renamed import modern, modern_argv

PACKAGE = Path(__file__).parent.parent
UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True)
class AtLeast:
    """value >= low, and finite."""

    low: float

    def complaint(self, value: float) -> str:
        """The requirement that a value violates, or "" if it violates none."""
        if self.low <= value < math.inf:
            return ""
        return f"at least {self.low}{'' if math.isfinite(value) else ' and finite'}"


@dataclass(frozen=True)
class Above:
    """value > low, and finite."""

    low: float

    def complaint(self, value: float) -> str:
        return "" if self.low < value < math.inf else f"a number above {self.low}"


@dataclass(frozen=True)
class AtMost:
    """value <= high."""

    high: float

    def complaint(self, value: float) -> str:
        return "" if value <= self.high else f"at most {self.high}"


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
            value = getattr(self, field.name)
            _check_type(name, value, hint)
            for extra in extras:
                if value is None or not isinstance(extra, CONSTRAINTS):
                    continue
                if complaint := extra.complaint(value):
                    raise ConfigError(f"{flag(name)} must be {complaint}, got {value}")


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ConfigError unless a value has the annotated type: plain, a Literal, or None."""
    allowed: list[str] = []
    for option in typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,):
        choices = typing.get_args(option)
        exact = type(value) is option or (option is float and type(value) is int)
        if value in choices if choices else exact:
            return
        allowed += choices or ([option.__name__] if option is not type(None) else [])
    raise ConfigError(f"{flag(name)} must be {' or '.join(allowed)}, got {value!r}")


# --- flat names and groups ------------------------------------------------------------------------


def places(config: type) -> dict[str, tuple[str, str]]:
    """Flat name -> (group, field), in order of declaration."""
    found = {}
    for group, kind in typing.get_type_hints(config).items():
        for field in fields(kind):
            found[group if field.name == "name" else field.name] = (group, field.name)
    return found


@dataclass(frozen=True)
class Grouped:
    """Base class of a config, whose fields are groups. Settings have the names of their flags."""

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A config from flat settings: `Config.of(group_size=8)`. Raises ConfigError."""
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> Self:
        """A copy with some settings changed. Raises ConfigError for an unknown or bad one."""
        known = places(type(self))
        groups: dict[str, dict[str, Any]] = {}
        for name, value in modern(settings).items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, list(known))}")
            group, field = known[name]
            groups.setdefault(group, {})[field] = value
        changed = {group: replace(getattr(self, group), **new) for group, new in groups.items()}
        return replace(self, **changed)

    def flat(self) -> dict[str, Any]:
        """Every setting, by flat name."""
        names = places(type(self)).items()
        return {name: getattr(getattr(self, group), field) for name, (group, field) in names}

    def resolved(self, given: Collection[str]) -> Self:
        """The config once all of its sources are read; `given` are the settings in them."""
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """A config from a TOML file. Raises ConfigError if it is unreadable or wrong."""
        values = read_settings(cls, path)
        return cls.of(**values).resolved(values)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, *, prog: str | None = None) -> Self:
        """Parse flags. On a mistake, print one line and exit with code 2."""
        try:
            files, rest = split_config_flag(argv)
            values = {name: x for path in files for name, x in read_settings(cls, path).items()}
            try:
                defaults = cls.of(**values)
            except ConfigError as error:
                raise ConfigError(f"--config {', '.join(files)}: {error}") from None
            check_known(cls, rest)
            about = "Train with GRPO. --config FILE.toml sets any of these; flags override it."
            flat = (tyro.conf.OmitArgPrefixes,)
            made = parse(cls, rest, default=defaults, description=about, config=flat, prog=prog)
            return made.resolved(values.keys() | given_flags(rest))
        except (ConfigError, argparse.ArgumentError) as error:
            exit_with(error)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a user would type them."""
    on_off = {True: "", False: "no_"}
    return [
        flag(on_off[x] + name) if isinstance(x, bool) else f"{flag(name)} {x}"
        for name, x in settings.items()
    ]


# --- TOML -----------------------------------------------------------------------------------------


def find_preset(path: str) -> Path:
    """The path of a file, or of a shipped preset given by name (`rtx4090`)."""
    presets = (PACKAGE / "configs", PACKAGE.parent / "configs")  # in a wheel, in a checkout
    if Path(path).suffix == "" and not Path(path).exists():
        for folder in presets:
            if (folder / f"{path}.toml").exists():
                return folder / f"{path}.toml"
            if names := sorted(file.stem for file in folder.glob("*.toml")):
                raise ConfigError(
                    f"--config {path}: no such file or preset; presets: {', '.join(names)}"
                )
    return Path(path)


def read_settings(config: type, path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file, by flat name. The file has a table per group, or no tables.

    A table `reward_weights` is converted to its text form. The table `versions` of a run's own
    config.toml is skipped. Raises ConfigError for a file that cannot be read, or an unknown key.
    """
    try:
        values = tomllib.loads(find_preset(str(path)).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path}: cannot be read ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: is not TOML: {error}") from None
    values.pop("versions", None)
    known = places(config)
    groups = {group for group, _ in known.values()}
    settings: dict[str, Any] = {}
    for key, value in values.items():
        in_table = key in groups and isinstance(value, Mapping)
        for name, x in value.items() if in_table else [(key, value)]:
            name, x = next(iter(modern({key if name == "name" else name: x}).items()))
            if in_table and name in known and known[name][0] != key:
                raise ConfigError(f"--config {path}: {name} belongs in [{known[name][0]}]")
            if name in settings:
                raise ConfigError(f"--config {path}: {name} is set twice")
            settings[name] = x
    weights = settings.get("reward_weights")
    if isinstance(weights, Mapping):
        settings["reward_weights"] = ",".join(f"{part}={x}" for part, x in weights.items())
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, list(known))
            raise ConfigError(f"--config {path}: unknown key {name!r}{hint}")
    return settings


def toml_lines(config: Any, leave_out: Iterable[str] = ()) -> list[str]:
    """A config as TOML, with a table per group. None is omitted, because TOML has no null."""
    lines: list[str] = []
    group = ""
    for name, (table, field) in places(type(config)).items():
        value = getattr(getattr(config, table), field)
        if value is None or name in leave_out:
            continue
        if table != group:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            group = table
        lines.append(f"{field} = {_toml_value(value)}")
    return lines


def _toml_value(value: Any) -> str:
    """A plain value as TOML. JSON's escapes of characters beyond the basic plane are not TOML."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- the command line -----------------------------------------------------------------------------


def split_config_flag(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The files given by `--config`, which may be repeated, and the other arguments.

    Raises argparse.ArgumentError for a --config without a file.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", action="append", default=[])
    chosen, rest = files.parse_known_args(argv)
    return chosen.config, modern_argv(rest)


def check_known(config: type, argv: Sequence[str]) -> None:
    """Raise ConfigError for an unknown flag, and suggest the most similar one."""
    names = {flag(no + name) for name in places(config) for no in ("", "no_")} | {"--help"}
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in names:
            flags = [flag(name) for name in places(config)]
            raise ConfigError(f"unknown flag {name}{did_you_mean(name, flags)}")


def given_flags(argv: Sequence[str]) -> set[str]:
    """Flat names of the settings that a command line sets."""
    words = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return {word.removeprefix("__").removeprefix("no_") for word in words}

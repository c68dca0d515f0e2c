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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro

from .fast import with_fast_layers
from .flags import ConfigError, did_you_mean, exit_with, flag, parse
from .renamed import modern, modern_argv

if TYPE_CHECKING:
    from ..config import Config

C = TypeVar("C", bound="Config")
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


def flat(config: Any) -> dict[str, Any]:
    """Every setting, by flat name."""
    return {
        name: getattr(getattr(config, group), field)
        for name, (group, field) in places(type(config)).items()
    }


def grouped(config: type, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Flat settings, regrouped by group and field. Raises ConfigError for an unknown name."""
    out: dict[str, dict[str, Any]] = {}
    known = places(config)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, list(known))}")
        group, field = known[name]
        out.setdefault(group, {})[field] = value
    return out


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
        if key in groups and isinstance(value, Mapping):
            settings |= {key if name == "name" else name: x for name, x in value.items()}
        else:
            settings[key] = value
    settings = modern(settings)
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
        lines.append(f"{field} = {json.dumps(value)}")
    return lines


def from_toml(config: type[C], path: str | Path) -> C:
    """See `Config.from_toml`."""
    values = read_settings(config, path)
    made = config.of(**values)
    return with_fast_layers(made, values) if made.speed.fast else made


# --- the command line -----------------------------------------------------------------------------


def from_cli(config: type[C], argv: Sequence[str] | None, prog: str | None) -> C:
    """See `Config.from_cli`."""
    try:
        files, rest = split_config_flag(argv)
        values = {name: x for path in files for name, x in read_settings(config, path).items()}
        try:
            defaults = config.of(**values)
        except ConfigError as error:
            raise ConfigError(f"--config {', '.join(files)}: {error}") from None
        check_known(config, rest)
        about = "Train with GRPO. --config FILE.toml sets any of these; flags override it."
        flat_flags = (tyro.conf.OmitArgPrefixes,)
        made = parse(
            config, rest, default=defaults, description=about, config=flat_flags, prog=prog
        )
        given = values.keys() | given_flags(rest)
        return with_fast_layers(made, given) if made.speed.fast else made
    except (ConfigError, argparse.ArgumentError) as error:
        exit_with(error)


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
            raise ConfigError(f"unknown flag {name}{did_you_mean(name, sorted(names))}")


def given_flags(argv: Sequence[str]) -> set[str]:
    """Flat names of the settings that a command line sets."""
    words = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return {word.removeprefix("__").removeprefix("no_") for word in words}


def check_divides(name: str, size: int, prompts: int, of_what: str) -> None:
    """Raise ConfigError unless `size` is 0 or divides `prompts`, which `of_what` describes."""
    if size and (size > prompts or prompts % size):
        divisors = ", ".join(str(n) for n in range(1, prompts + 1) if prompts % n == 0)
        raise ConfigError(
            f"{flag(name)} must divide {of_what}: one of {divisors} (0: all), got {size}"
        )


def check_shares(config: "Config", processes: int) -> None:
    """Raise ConfigError unless prompts and micro-batches divide evenly among processes."""
    prompts = config.sampling.prompts_per_step
    if prompts % processes:
        less = max(processes, prompts // processes * processes)
        near = sorted({less, (prompts // processes + 1) * processes})
        raise ConfigError(
            f"--prompts-per-step {prompts} does not divide among {processes} processes; "
            f"{' or '.join(map(str, near))} would"
        )
    share = prompts // processes
    for name in ("micro_batch_size", "rollout_batch_size"):
        size = getattr(config.memory, name)
        check_divides(name, size, share, f"the {share} prompts of each process")

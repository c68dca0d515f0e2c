"""The machinery under Config: settings by their flat names, from TOML files, flags and Python.

A config is a dataclass of groups, and a group (see constraints.py) is a dataclass of plain fields.
In Python a setting is `config.sampling.group_size`; its flag is `--group-size`, without the group.
The flag of a field `name` is the name of its group: `config.loss.name` is `--loss`.
"""

import json
import sys
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from .constraints import UNIONS
from .flags import (
    ConfigError,
    as_flags,
    did_you_mean,
    exit_with,
    flag,
    job_of,
    read_flags,
    show_help,
    shown,
)
from .renamed import NAMES, modern
from .toml_files import RECORD as RECORD
from .toml_files import find_preset as find_preset
from .toml_files import read_toml

# --- flat names and groups ------------------------------------------------------------------------


def places(config: type) -> dict[str, tuple[str, str]]:
    """Flat name -> (group, field), in order of declaration."""
    found = {}
    for group, kind in groups_of(config).items():
        for field in fields(kind):
            found[group if field.name == "name" else field.name] = (group, field.name)
    return found


def groups_of(config: type) -> dict[str, Any]:
    """The class of each group, by the group's name."""
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


def kinds(config: type) -> dict[str, tuple[type, ...]]:
    """The types that each setting may have, by flat name, old names included."""
    found = {}
    groups = groups_of(config)
    for name, (group, field) in places(config).items():
        hint = typing.get_type_hints(groups[group])[field]
        options = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
        found[name] = tuple(str if typing.get_args(x) else x for x in options)
    return found | {old: now.kinds or found[now.name] for old, now in NAMES.items()}


def current(config: type, settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by their current names. Raises ConfigError for a bad value under an old name.

    Such a value is checked here, because the message must have the name that the user knows.
    `where` begins it.
    """
    for old in settings.keys() & NAMES.keys():
        ((name, value),) = modern({old: settings[old]}).items()
        group, field = places(config)[name]
        try:
            groups_of(config)[group](**{field: value})
        except ConfigError as error:
            raise ConfigError(f"{where}{flag(old)} {shown(settings[old])}: {error}") from None
    return modern(settings)


@dataclass(frozen=True)
class Grouped:
    """Base class of a config, whose fields are groups. Settings have the names of their flags."""

    # settings that somebody set; those of them that were set in Python or on the command line
    given: ClassVar[frozenset[str]] = frozenset()
    typed: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A config from flat settings: `Config.of(group_size=8)`. Raises ConfigError."""
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> Self:
        """A copy with some settings changed. Raises ConfigError for an unknown or bad one."""
        names = modern(settings).keys()
        return self._with(settings, given=self.given | names, typed=self.typed | names)

    def derived(self, **settings: Any) -> Self:
        """A copy with settings that follow from others: nobody gave them. Raises ConfigError."""
        return self._with(settings, self.given, self.typed)

    def _with(
        self, settings: Mapping[str, Any], given: frozenset[str], typed: frozenset[str]
    ) -> Self:
        """A copy with some settings changed and checked, which remembers where they come from."""
        if {"task", "data"} & (settings := modern(settings)).keys():
            settings = {**self._of_task({**self.flat(), **settings}, given), **settings}
        made = replace(self, **self._groups(settings)).resolved(given)
        # no fields, because configs with the same values are equal wherever these come from
        object.__setattr__(made, "given", given)
        object.__setattr__(made, "typed", typed)
        return made

    def _of_task(self, now: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
        """The settings of another task in place of those of this one, except what is given."""
        default, by_task = type(self)().flat(), self.settings_by_task()
        old = {name: default[name] for name in by_task.get(job_of(self.flat()), {})}
        new = {**old, **by_task.get(job_of(now), {})}
        return {name: value for name, value in new.items() if name not in given}

    def _groups(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The groups with some settings changed, not yet checked across settings."""
        known = places(type(self))
        groups: dict[str, dict[str, Any]] = {group: {} for group, _ in known.values()}
        for name, value in current(type(self), settings).items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, list(known))}")
            group, field = known[name]
            groups[group][field] = value
        return {group: replace(getattr(self, group), **new) for group, new in groups.items()}

    def flat(self) -> dict[str, Any]:
        """Every setting, by flat name."""
        names = places(type(self)).items()
        return {name: getattr(getattr(self, group), field) for name, (group, field) in names}

    @staticmethod
    def settings_by_task() -> Mapping[str, Mapping[str, Any]]:
        """What each task changes from the defaults, by flat name; nothing here."""
        return {}

    def resolved(self, given: Collection[str]) -> Self:
        """The config once all of its sources are read; `given` are the settings in them."""
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """A config from a TOML file. Raises ConfigError, which names the file."""
        return cls._merged([path], {})

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, *, prog: str | None = None) -> Self:
        """Parse flags. On a mistake, print one line and exit with code 2."""
        words = sys.argv[1:] if argv is None else argv
        try:
            if {"-h", "--help"} & set(words):
                show_help(groups_of(cls), description(cls), prog)
            flags = read_flags(words, kinds(cls) | {"config": (str,)})
            return cls._merged(flags.pop("config", []), flags)
        except ConfigError as error:
            exit_with(error)

    @classmethod
    def _merged(cls, paths: Sequence[str | Path], typed: Mapping[str, Any]) -> Self:
        """A config from files, then flags, each over the ones before. Raises ConfigError.

        Only the result is checked across settings, because a flag may make a file's value fit.
        """
        default, flags = cls(), current(cls, typed)
        default._groups(flags)
        values: dict[str, Any] = {}
        for path in paths:
            own = read_settings(cls, path)
            try:
                default._groups(own)
            except ConfigError as error:
                raise ConfigError(f"--config {path}: {error}") from None
            values |= own
        values |= flags
        try:
            return default._with(values, frozenset(values), frozenset(flags))
        except ConfigError as error:
            files = f" (with --config {', '.join(map(str, paths))})" if paths else ""
            raise ConfigError(f"{error}{files}") from None


# --- TOML -----------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether this is a run's folder."""
    return (path / RECORD).is_file()


def read_settings(config: type, path: str | Path, *, by: str = "--config ") -> dict[str, Any]:
    """The settings of a TOML file, by flat name. The file has a table per group, or no tables.

    A table `reward_weights` is converted to its text form. The table `versions` of a run's own
    config.toml is skipped. Raises ConfigError for a file that cannot be read or sets nothing, and
    for an unknown key; the message begins with `by` and the path.
    """
    return _settings_in(config, read_toml(path, by), f"{by}{path}")


def read_record(config: type[Grouped], run: Path) -> dict[str, Any]:
    """The settings of a run's folder, by flat name. Raises ConfigError, which names the file.

    In place of a record that is cut off, the defaults would mean another task or tokenizer. A
    record ends with the table `versions`, so one without it is not whole.
    """
    file = run / RECORD
    values = read_toml(file, "")
    settings = _settings_in(config, values, str(file))
    if "versions" not in values:
        raise ConfigError(f"{file}: is cut off, a run's record ends with the table [versions]")
    try:
        config.of(**settings)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return settings


def _settings_in(config: type, contents: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings in a file's `contents`, by flat name. Raises ConfigError; `where` begins it."""
    values = {name: value for name, value in contents.items() if name != "versions"}
    if not isinstance(contents.get("versions", {}), Mapping):
        raise ConfigError(f"{where}: versions must be a table, as in a run's {RECORD}")
    if not values:
        raise ConfigError(f"{where}: has no settings")
    known = places(config)
    groups = {group for group, _ in known.values()}
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if key in groups - known.keys() and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {key} must be a table, [{key}]")
        in_table = key in groups and isinstance(value, Mapping)
        for name, x in value.items() if in_table else [(key, value)]:
            given = {key if name == "name" else name: x}
            ((name, x),) = current(config, given, f"{where}: ").items()
            if in_table and name in known and known[name][0] != key:
                raise ConfigError(f"{where}: {name} belongs in [{known[name][0]}]")
            if name in settings:
                raise ConfigError(f"{where}: {name} is set twice")
            settings[name] = x
    weights = settings.get("reward_weights")
    if isinstance(weights, Mapping):
        settings["reward_weights"] = _weights_as_text(weights, where)
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, list(known))
            raise ConfigError(f"{where}: unknown key {name!r}{hint}")
    return settings


def _weights_as_text(weights: Mapping[str, Any], where: str) -> str:
    for part in weights:
        if set(part) & set(",="):
            raise ConfigError(
                f"{where}: [reward_weights] names one part per line, without , and =, got {part!r}"
            )
    return ",".join(f"{part}={x}" for part, x in weights.items())


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
        lines.append(f"{field} = {toml_value(value)}")
    return lines


def toml_value(value: Any) -> str:
    """A plain value as TOML. JSON's escapes of characters beyond the basic plane are not TOML."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- --help ---------------------------------------------------------------------------------------


def description(config: type[Grouped]) -> str:
    """What --help says first."""
    about = "Train with GRPO. --config FILE.toml sets any of these; flags override it."
    for task, own in config.settings_by_task().items():
        about += f" Settings of the task {task}: {' '.join(as_flags(own))}."
    return about

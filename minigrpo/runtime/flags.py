"""Read a command line. An error is one line that names the flag and what is allowed; exit code 2.

`read_flags` reads the flags of a run. They are declared in config.py and checked in settings.py.
`parse` reads the flags of the tools with tyro, which also prints every --help.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

Parsed = TypeVar("Parsed")
MOST_CHARACTERS = 60  # of a value in a message
CONFIG_HELP = "A TOML file with settings, or the name of a shipped preset; may be repeated."
WHAT = {int: "a whole number", float: "a number", str: "a name, a path or a list"}


class ConfigError(ValueError):
    """A setting has a value that is not allowed. The message is one line that names the flag."""


def job_of(settings: Mapping[str, Any]) -> str:
    """The task of some settings, such as `math`, or `math with --data`: their defaults differ."""
    return f"{settings.get('task')}{' with --data' if settings.get('data') else ''}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a user would type them."""
    on_off = {True: "", False: "no_"}
    return [
        flag(on_off[x] + name) if isinstance(x, bool) else f"{flag(name)} {x}"
        for name, x in settings.items()
    ]


def exit_with(error: Exception) -> NoReturn:
    """Print one line on stderr, with the notes of `DistContext.during`, and exit with code 2."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    # a path or somebody's own error may hold line breaks and what controls a terminal
    line = "".join(
        c if c.isprintable() else " " if c == "\n" else ascii(c)[1:-1] for c in f"{error}{notes}"
    )
    sys.stderr.write(f"error: {line}\n")
    raise SystemExit(2)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "; --help lists what is allowed"


def shown(value: Any) -> str:
    """A value as a message shows it: cut off where it is long."""
    if isinstance(value, int) and abs(value) >= 10**MOST_CHARACTERS:
        # Python refuses to write integers of more than 4,300 digits
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """End quietly when the reader of stdout has gone, as `| head` goes after ten lines.

    A stdout that is closed or full is no reason for a traceback either: that ends with exit code 1.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None where it was closed before the start
                sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # the interpreter flushes it as it exits
        raise SystemExit(0) from None


# --- the flags of a run ---------------------------------------------------------------------------


def read_flags(argv: Sequence[str], kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The values that a command line gives, by flat name, as the type of each flag.

    Accepts `--name value`, `--name=value`, and `--name` or `--no-name` for one that is on or off.
    The last value counts where a flag is repeated, except for `config`, whose values are a list.

    Args:
        kinds: the allowed types by flat name: bool alone, or int, float, str, perhaps with None.

    Raises:
        ConfigError: an unknown flag, a missing or unreadable value, or a word that belongs to none.
    """
    values: dict[str, Any] = {}
    words, before = list(argv), ""
    while words:
        name, equals, text = words.pop(0).partition("=")
        if not name.startswith("--"):
            switch = before in kinds and kinds[before] == (bool,)
            hint = f"; {_on_or_off(before)}" if switch else "; --help lists what is allowed"
            raise ConfigError(f"{shown(name + equals + text)} belongs to no flag{hint}")
        typed, name = name.replace("_", "-"), name.removeprefix("--").replace("-", "_")
        negated = name.startswith("no_") and kinds.get(name[3:]) == (bool,)
        before = name = name[3:] if negated else name
        if name not in kinds:
            known = [flag(known) for known in kinds]
            known += [flag(f"no_{known}") for known, kind in kinds.items() if kind == (bool,)]
            raise ConfigError(f"unknown flag {typed[:MOST_CHARACTERS]}{did_you_mean(typed, known)}")
        if kinds[name] == (bool,):
            if equals:
                raise ConfigError(f"{typed} takes no value, got {shown(text)}; {_on_or_off(name)}")
            values[name] = not negated
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{typed} needs a value, {_allowed(kinds[name])}")
            text = words.pop(0)
        value = _typed(typed, text, kinds[name])
        values[name] = [*values.get(name, []), value] if name == "config" else value
    return values


def _on_or_off(name: str) -> str:
    return f"{flag(name)} turns it on, {flag('no_' + name)} turns it off"


def _allowed(kinds: tuple[type, ...]) -> str:
    return " or ".join(WHAT.get(kind, "None") for kind in kinds)


def _typed(typed: str, text: str, kinds: tuple[type, ...]) -> Any:
    if types.NoneType in kinds and text in ("None", "none"):
        return None
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    try:
        return kind(text)
    except ValueError:
        # so many digits that Python does not convert them
        what = "smaller" if re.fullmatch(r"[+-]?\d+", text) else _allowed(kinds)
        raise ConfigError(f"{typed} must be {what}, got {shown(text)}") from None


# --- --help, and the flags of the tools -----------------------------------------------------------


def parse(kind: type[Parsed], argv: Sequence[str] | None = None, **options: Any) -> Parsed:
    """Make a dataclass from flags; `options` go to tyro. Raises ConfigError for a bad flag."""
    complaint = io.StringIO()
    try:
        with closed_pipe_is_no_error(), contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=argv, **options)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_paragraph(complaint.getvalue())) from None


def show_help(groups: Mapping[str, Any], about: str, prog: str | None) -> NoReturn:
    """Print the flags of a run with their defaults, by group, and exit.

    Args:
        groups: name -> the dataclass of its settings.
        about: what is said first.
    """
    files = Annotated[str, tyro.conf.arg(metavar="FILE", help=CONFIG_HELP)]
    flags: list[Any] = [("config", files, dataclasses.field(default=""))]
    for group, kind in groups.items():
        flags.append((group, kind, dataclasses.field(default=kind())))
    options = dataclasses.make_dataclass("Options", flags)
    parse(options, ["--help"], description=about, config=(tyro.conf.OmitArgPrefixes,), prog=prog)
    raise SystemExit(0)


UNREADABLE = {  # what Python says about a value -> what is allowed
    r"invalid literal for int\(\) with base 10:": "must be a whole number, got",
    r"could not convert string to float:": "must be a number, got",
    r"no type matching .* could be instantiated from": "must be a number, got",
}


def _first_paragraph(panel: str) -> str:
    """The message in tyro's framed panel, as one line."""
    words: list[str] = []
    for line in panel.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if set(text) - set("─-"):
            words.append(text)
        elif words:  # the line that ends the message; one of dashes begins it without Unicode
            break
    message = re.sub(r"^Error parsing \w+: ", "", " ".join(words)).rstrip(".")
    for said, meant in UNREADABLE.items():
        message = re.sub(rf"^Error parsing ([^:]+): {said}", rf"\1 {meant}", message)
    return f"{message} (--help lists what is allowed)"

"""Parse flags with tyro. An error is one line that names the flag and what is allowed; exit code 2.

Which flags exist is in config.py; how they are grouped and checked is in settings.py.
"""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import tyro

Parsed = TypeVar("Parsed")


class ConfigError(ValueError):
    """A setting has a value that is not allowed. The message is one line that names the flag."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def exit_with(error: Exception) -> NoReturn:
    """Print one line on stderr, with the notes of `DistContext.during`, and exit with code 2."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    sys.stderr.write(f"error: {error}{notes}\n")
    raise SystemExit(2)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "; --help lists what is allowed"


def parse(kind: type[Parsed], argv: Sequence[str] | None = None, **options: Any) -> Parsed:
    """Make a dataclass from flags; `options` go to tyro. Raises ConfigError for a bad flag."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=argv, **options)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_paragraph(complaint.getvalue())) from None


def _first_paragraph(panel: str) -> str:
    """The message in tyro's framed panel, as one line."""
    words: list[str] = []
    for line in panel.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if words and (not text or set(text) <= {"─"}):
            break
        words.append(text)
    message = re.sub(r"^Error parsing \w+: ", "", " ".join(words))
    return f"{message} (--help lists what is allowed)"

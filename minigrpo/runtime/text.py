"""Text that comes from outside: parse JSON, and show errors and values in one line.

A file, a user's code or a model may produce anything: JSON that is nested 100,000 levels deep, half
of a surrogate pair, an exception that raises when it is printed. Nothing here raises anything but
ValueError.
"""

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_ERROR_CHARS = 300
MAX_VALUE_CHARS = 60
MAX_PATH_CHARS = 200


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with or without a byte order mark.

    Raises:
        ValueError: the text is not JSON or not UTF-8, an object has a key twice, or it is nested
            too deeply. Python raises RecursionError for the last one, which callers forget.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return DECODER.decode(decoded.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of two values for one key, `dict` would silently keep the second one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short(twice)} occurs twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # json.loads would make one per line


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which no encoding can write.

    JSON can spell one (`"\\ud800"`), and Python's strings can hold it. It would raise later, in the
    logs or in the tokenizer.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def as_asked(question: str) -> str:
    """A question of a file without what copies of it differ in: white space, and Unicode's forms.

    Two questions are in one split if this is equal for both.
    """
    return " ".join(unicodedata.normalize("NFC", question).split())


def check_file_name(path: str | Path) -> None:
    """Raise ValueError for a name that no file can have, or that the system cannot look up.

    That is one that is not UTF-8, or too long, or a circle of symbolic links. A name that does not
    exist is left to the caller.
    """
    if has_lone_surrogate(str(path)) or "\0" in str(path):
        raise ValueError(f"{printable(str(path))}: the name is not valid UTF-8; rename the file")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        shown = str(path) if len(str(path)) <= MAX_PATH_CHARS else f"{path!s:.{MAX_PATH_CHARS}}..."
        raise ValueError(f"{printable(shown)}: cannot be read ({error.strerror})") from None


def printable(text: str) -> str:
    """Return a text in one line, with characters that cannot be printed written as escapes."""
    joined = " ".join(text.split())
    if joined.isprintable():
        return joined
    return "".join(
        x if x.isprintable() else x.encode("unicode_escape").decode("ascii") for x in joined
    )


def one_line(error: BaseException) -> str:
    """Return `Type: message` of any exception, in one line."""
    return f"{type(error).__name__}: {_shown(error, str, MAX_ERROR_CHARS)}".removesuffix(": ")


def short(value: object) -> str:
    """Return the type of any value and the beginning of its text, for an error message."""
    return f"{type(value).__name__} {_shown(value, str, MAX_VALUE_CHARS)!r}"


def quoted(value: object) -> str:
    """Return the beginning of the `repr` of any value."""
    return _shown(value, repr, MAX_VALUE_CHARS)


def _shown(value: object, write: Callable[[object], str], limit: int) -> str:
    try:
        return printable(write(value)[:limit])
    except KeyboardInterrupt:
        raise
    except BaseException:  # a user's `__str__` may raise anything, and must not hide the error
        return "(cannot be shown)"

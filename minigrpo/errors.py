"""Errors about bad input."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Bad input of the user's: a setting, a file, a function. The commands print it as one line."""


def text_of(error: BaseException, form: Callable[[object], str] = repr) -> str:
    """What `repr` or `str` says about an error of others; its type alone if that raises, too."""
    try:
        return form(error)[:500]
    except BaseException:
        return type(error).__name__


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Make any error a ConfigError about `what`, a file or code of others."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any type: in Rust, a panic of a package is no Exception
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{text_of(error, str)}") from None

"""The errors that end a command with one line, and what makes other errors one of them."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Bad input of the user's: a setting, a file, a function. The commands print it as one line."""


class RunFailed(RuntimeError):
    """The run cannot continue. The commands print it as one line."""


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Make any error a ConfigError about `what`, a file or code of others."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any type: in Rust, a panic of a package is no Exception
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{error!s:.500}") from None

"""The errors that end a command with one line, and functions that turn other errors into them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ConfigError(ValueError):
    """Bad input: a setting, a file, a function. The commands print it as one line."""


class RunFailed(RuntimeError):
    """The run cannot continue. The commands print it as one line."""


def error_text(error: BaseException) -> str:
    """The type of any error and its message, unless writing the message raises too."""
    message = ""
    with suppress(BaseException):
        message = f": {error!s:.500}"
    return type(error).__name__ + message.removesuffix(": ")


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Make any error a ConfigError about `what`, such as a file or a package."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a package in Rust is not an Exception
        message = error if isinstance(error, ConfigError) else error_text(error)
        raise ConfigError(f"{what}: {message}") from None

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


@contextmanager
def collecting(errors: list[str]) -> Iterator[None]:
    """Keep a ConfigError about a row for `refuse_rows`."""
    try:
        yield
    except ConfigError as error:
        errors.append(str(error))


def refuse_rows(errors: list[str], total: int) -> None:
    """Raise one ConfigError if some of the `total` rows cannot be used."""
    if len(errors) > 1:
        raise ConfigError(f"{len(errors)} of {total} rows cannot be used; the first is {errors[0]}")
    if errors:
        raise ConfigError(errors[0])

"""The errors that end a command with one line, and what makes other errors one of them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ConfigError(ValueError):
    """Bad input of the user's: a setting, a file, a function. The commands print it as one line."""


class RunFailed(RuntimeError):
    """The run cannot continue. The commands print it as one line."""


def error_text(error: BaseException) -> str:
    """The type of an error of others, and what it says, unless saying it raises too."""
    said = ""
    with suppress(BaseException):
        said = f": {error!s:.500}"
    return type(error).__name__ + said.removesuffix(": ")


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Make any error a ConfigError about `what`, a file or code of others."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any type: in Rust, a panic of a package is no Exception
        said = error if isinstance(error, ConfigError) else error_text(error)
        raise ConfigError(f"{what}: {said}") from None


@contextmanager
def collecting(errors: list[str]) -> Iterator[None]:
    """Keep a ConfigError about a row for `refuse_rows`."""
    try:
        yield
    except ConfigError as error:
        errors.append(str(error))


def refuse_rows(errors: list[str], total: int) -> None:
    """Raise one ConfigError for all rows, of so many, that cannot be used."""
    if len(errors) > 1:
        raise ConfigError(f"{len(errors)} of {total} rows cannot be used; first {errors[0]}")
    if errors:
        raise ConfigError(errors[0])

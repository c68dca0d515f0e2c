"""How a run may fail for a reason that one line explains. Any other exception keeps its traceback.

Bad settings and data are `ConfigError` (flags.py), with exit code 2.
"""


class RunFailed(RuntimeError):
    """The run cannot continue. The message is one line; the command ends with exit code 1."""


class Diverged(RunFailed):
    """Losses, gradients or weights are not finite, and skipping steps does not help."""


class NotFinite(RunFailed):
    """A checkpoint was to hold a value that is not finite; it was not written."""


def reason_of(error: BaseException) -> str:
    """What an exception says, as one short line, even if its own `__str__` raises."""
    try:
        text = getattr(error, "strerror", None) or str(error)
        return " ".join(text.split())[:200] or type(error).__name__
    except Exception:
        return type(error).__name__


def in_one_line(error: Exception) -> Exception:
    """An error of a file with its name; any other OSError is a mistake of the program: raise it."""
    if isinstance(error, OSError):
        if error.filename is None:
            raise error
        return ValueError(f"{error.filename}: {reason_of(error)}")
    return ValueError(" ".join(str(error).split("\n")))


def describe(error: BaseException | None) -> str:
    """An exception's repr, even if that raises, as it may for a class from a user's file."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__

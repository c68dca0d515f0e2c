"""How a tool ends: a mistake or Ctrl-C is one line on stderr, never a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.failures import in_one_line
from ..runtime.flags import exit_with
from .cli import CTRL_C


@contextmanager
def one_line_errors(when_stopped: str = "stopped") -> Iterator[None]:
    """In this context a ValueError ends the program with code 2, and Ctrl-C with code 130.

    So does the OSError of a file, such as one in a folder of another user. `when_stopped` is what
    Ctrl-C prints.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        exit_with(in_one_line(error))
    except KeyboardInterrupt:
        sys.stderr.write(f"{when_stopped}\n")
        raise SystemExit(CTRL_C) from None

"""Check that a program is a UCI chess engine."""

import contextlib
import os
import signal
import subprocess
from itertools import islice
from threading import Timer

MOST_LINES = 10_000  # an engine describes itself in about 30
LONGEST_LINE = 2**16


def answers_uci(path: str, seconds: float = 10.0) -> bool:
    """Whether a program answers `uci` with `uciok`. It is not running any more afterwards.

    Of any other program python-chess leaves a warning of its event loop on the screen, after ten
    seconds. A program may also never read, never end, or never stop writing.

    Raises OSError if it cannot be started.
    """
    process = subprocess.Popen(
        [path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that what it starts itself is ended with it
    )
    timer = Timer(seconds, _kill, (process,))
    timer.start()
    assert process.stdin and process.stdout
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"uci\nquit\n")
            process.stdin.close()
        lines = iter(lambda: process.stdout.readline(LONGEST_LINE), b"")  # type: ignore[union-attr]
        return any(line.strip() == b"uciok" for line in islice(lines, MOST_LINES))
    finally:
        timer.cancel()
        _kill(process)
        process.stdout.close()
        process.wait()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

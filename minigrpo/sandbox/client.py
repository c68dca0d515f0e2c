"""Runs code that a model wrote, in idle workers of the sandbox, and says which tests it passes.

docs/tasks.md says how a test is judged, what the sandbox protects, and where its limits are.
"""

import ast
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from .worker import frame, receive

# Wall time is this factor times CPU time, and some more, because a busy machine must not make a
# right program wrong.
WALL_FACTOR, WALL_EXTRA_S = 3.0, 5.0
PATIENCE_S = 20.0  # limit for a worker to start, and to end a program, on a busy machine

# Asks a program's process to "exec" or "eval" a source. It gives [the value], which is None for
# statements, or [] if the source raises or the value is not plain.
Ask = Callable[[str, str], list[object]]


def run_tests(
    code: str,
    tests: Sequence[str],
    setup: str = "",
    timeout_s: float = 3.0,
) -> list[bool]:
    """Run code in a process of its own, then `setup`, then each test; return a verdict per test.

    A test is a statement, such as `assert f(2) == 5`. All of them together have `timeout_s` seconds
    of CPU time, rounded up. Raises OSError if no process can be started.
    """
    expressions = [sides(test) for test in tests]
    expected = [value_of(right, timeout_s) for _, right in expressions]
    with running(timeout_s) as ask:
        loaded = ask("exec", f"{code}\n{setup}") == [None]
        verdicts = []
        for test, (left, _), value in zip(tests, expressions, expected, strict=True):
            mode, source = ("eval", left) if value else ("exec", test)
            verdicts.append(loaded and ask(mode, source) == (value or [None]))
    return verdicts


@lru_cache(maxsize=10_000)
def value_of(right: str, timeout_s: float) -> list[object]:
    """[The value] of a right side, or []: evaluated without the program, which could read it."""
    with running(timeout_s) as ask:
        return ask("eval", right)


@contextmanager
def running(timeout_s: float) -> Iterator[Ask]:
    """Start a process for a program; its worker ends it, with its threads, after use."""
    try:
        worker = _idle.pop()
        connection = worker.start()
    except (IndexError, OSError):  # no worker is idle, or the system has ended it
        worker = Worker()
        connection = worker.start()
    deadline = time.monotonic() + WALL_FACTOR * timeout_s + WALL_EXTRA_S
    stream = connection.makefile("rwb")
    stream.write(frame(timeout_s))  # sent with the first request

    def ask(mode: str, source: str) -> list[object]:
        key = secrets.token_hex(8)  # the program echoes it after the work
        with suppress(Exception):  # the program may send anything
            connection.settimeout(deadline - time.monotonic())  # an error if none is left
            stream.write(frame((mode, source)) + frame(key))
            stream.flush()
            echoed = receive(stream)
            answer = receive(stream)
            if echoed == key:
                return answer
        return []

    yield ask
    connection.close()
    with suppress(OSError):
        worker.control.sendall(b"e")
        _idle.append(worker)


class Worker:
    """A process that runs one program after another."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(PATIENCE_S)
        self.process = subprocess.Popen(
            # without site-packages, and with the same hashes in every run
            [sys.executable, "-S", "-P", Path(__file__).with_name("worker.py")],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": ""},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()

    def start(self) -> socket.socket:
        """The connection to the process of a new program."""
        message, descriptors, *_ = socket.recv_fds(self.control, 1 << 10, 1)
        if not descriptors:
            raise ConnectionError("the process that runs code has ended")
        unheld = json.loads(message)
        if unheld:
            # with this stacklevel Python shows the warning once, whoever runs programs
            warnings.warn(
                f"in the sandbox the kernel does not guard {' and '.join(unheld)}: "
                "only an audit hook of Python does, and hostile code can get around it",
                stacklevel=1,
            )
        return socket.socket(fileno=descriptors[0])


# One worker for each thread that ran code at the same time. It ends when its connection closes.
_idle: list[Worker] = []


def sides(test: str) -> tuple[str, str]:
    """The two sides of `assert left == right`, or empty texts for another kind of test."""
    with suppress(SyntaxError, ValueError):
        match ast.parse(test).body:
            case [ast.Assert(ast.Compare(left, [ast.Eq()], [right]))]:
                return ast.unparse(left), ast.unparse(right)
    return "", ""

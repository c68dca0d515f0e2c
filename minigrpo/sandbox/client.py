"""The trainer's side of the sandbox: warm workers, and what it asks of the programs in them."""

import ast
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .worker import frame, receive

# wall time, of CPU time: generous, because a pause of the machine makes no right program wrong
WALL_FACTOR, WALL_EXTRA_S = 3.0, 5.0
PATIENCE_S = 20.0  # for a worker to start, and to end a program, on a busy machine


def run_tests(
    code: str, tests: Sequence[str], setup: str = "", timeout_s: float = 3.0
) -> list[bool]:
    """Run code in a process of its own, then each test against it; one verdict per test.

    Args:
        code: a Python program, of any text.
        tests: Python statements, such as `assert f(2) == 5`.
        setup: statements that run after the code and before the tests.
        timeout_s: seconds of CPU time for all of this together, rounded up.

    Raises:
        OSError: no process can be started to run it.
    """
    try:
        worker = _idle.pop()
        connection = worker.start()
    except (IndexError, OSError):  # none is idle, or the system has ended it
        worker = Worker()
        connection = worker.start()
    deadline = time.monotonic() + WALL_FACTOR * timeout_s + WALL_EXTRA_S
    stream = connection.makefile("rwb")
    stream.write(frame(timeout_s))  # sent with the first request

    def ask(kind: str, source: str) -> list[Any]:
        """[The value of an expression, None of statements]; [] if it raises or is not plain."""
        key = secrets.token_hex(8)  # shows that an answer is one
        with suppress(Exception):  # the program may send anything
            connection.settimeout(deadline - time.monotonic())  # an error where none is left
            stream.write(frame((kind, source)) + frame(key))
            stream.flush()
            echoed, answer = receive(stream), receive(stream)
            if echoed == key:
                return answer
        return []

    split = [sides(test) for test in tests]
    expected = [ask("eval", right) for _, right in split]  # before a program can change them
    loaded = ask("exec", f"{code}\n{setup}") == [None]
    verdicts = [
        loaded and (ask("eval", left) == right if right else ask("exec", test) == [None])
        for test, (left, _), right in zip(tests, split, expected, strict=True)
    ]
    connection.close()
    with suppress(OSError):  # the worker ends the program, with all that it started
        worker.control.sendall(b"e")
        _idle.append(worker)
    return verdicts


class Worker:
    """A process that runs one program after another."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(PATIENCE_S)
        self.process = subprocess.Popen(
            # no site-packages, and the same hashes in every run
            [sys.executable, "-S", "-P", Path(__file__).with_name("worker.py")],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": ""},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()

    def start(self) -> socket.socket:
        """The connection to the process of a new program."""
        descriptors = socket.recv_fds(self.control, 1, 1)[1]
        if not descriptors:
            raise ConnectionError("the process that runs code has ended")
        return socket.socket(fileno=descriptors[0])


# One for each thread that has run code at the same time. A worker ends when its connection does.
_idle: list[Worker] = []


def sides(test: str) -> tuple[str, str]:
    """The sides of `assert left == right`; empty ones of a test that is something else."""
    with suppress(SyntaxError, ValueError):
        match ast.parse(test).body:
            case [ast.Assert(ast.Compare(left, [ast.Eq()], [right]))]:
                return ast.unparse(left), ast.unparse(right)
    return "", ""

"""The trainer's side of the sandbox: warm workers, and what it asks of the programs in them."""

import ast
import atexit
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

from .worker import encode, frame, receive

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
        return _idle.pop().run(code, tests, setup, timeout_s)
    except (IndexError, OSError):  # none is idle, or the system has ended it
        return Worker().run(code, tests, setup, timeout_s)


class Worker:
    """A process that runs one program after another."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(PATIENCE_S)
        script, descriptor = str(Path(__file__).with_name("worker.py")), theirs.fileno()
        self.process = subprocess.Popen(
            # no site-packages, and the same hashes in every run
            [sys.executable, "-s", "-S", "-P", "-B", script, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": ""},
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()

    def run(self, code: str, tests: Sequence[str], setup: str, timeout_s: float) -> list[bool]:
        """Run a program, end it with all that it started, and be idle again."""
        try:
            _, (descriptor, *_), _, _ = socket.recv_fds(self.control, 1, 1)
            with socket.socket(fileno=descriptor) as connection:
                verdicts = Program(connection, timeout_s).verdicts(code, tests, setup)
            self.control.sendall(b"e")
        except (ValueError, OSError) as error:
            self.close()
            raise ConnectionError("the process that runs code has ended") from error
        _idle.append(self)
        return verdicts

    def close(self) -> None:
        """End the worker: it ends by itself when the connection does, unless it hangs."""
        self.control.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


_idle: list[Worker] = []  # one for each thread that has run code at the same time


@atexit.register
def close() -> None:
    """End all idle workers."""
    while _idle:
        _idle.pop().close()


class Program:
    """The process of a program, which answers requests in order. It may send anything."""

    def __init__(self, connection: socket.socket, cpu_s: float) -> None:
        self.connection, self.stream = connection, connection.makefile("rwb")
        self.deadline = time.monotonic() + WALL_FACTOR * cpu_s + WALL_EXTRA_S
        self.stream.write(frame(cpu_s))  # sent with the first request

    def verdicts(self, code: str, tests: Sequence[str], setup: str) -> list[bool]:
        """Load the program, and decide each test."""
        split = [sides(test) for test in tests]
        # other right sides than literals: before the program is there to change them
        expected = [known or self.ask("eval", right) for _, right, known in split]
        if not all(self.ask("exec", part) == [True] for part in (code, setup)):
            return [False] * len(tests)
        return [
            self.ask("eval", left) == right if right else self.ask("exec", test) == [True]
            for test, (left, _, _), right in zip(tests, split, expected, strict=True)
        ]

    def ask(self, kind: str, source: str) -> list[Any]:
        """[The value of a piece of Python], or [] if it raises or has no plain value."""
        key = secrets.token_hex(8)  # shows that an answer is one
        with suppress(Exception):  # whatever was sent
            self.connection.settimeout(max(1e-3, self.deadline - time.monotonic()))
            self.stream.write(frame((kind, source)) + frame(key))
            self.stream.flush()
            echoed, answer = receive(self.stream), receive(self.stream)
            if echoed == key:
                return list(answer)
        return []


def sides(test: str) -> tuple[str, str, list[Any]]:
    """The sides of `assert left == right`, and [the value of right] if it is a plain literal.

    Of a test that is something else, empty ones.
    """
    left = right = ""
    with suppress(SyntaxError, ValueError, TypeError):
        match ast.parse(test).body:
            case [ast.Assert(ast.Compare(node, [ast.Eq()], [other]))]:
                left, right = ast.unparse(node), ast.unparse(other)
                known = ast.literal_eval(other)
                encode(known)  # or raise TypeError
                return left, right, [known]
    return left, right, []

"""The trainer's side of the sandbox: warm workers, and what it asks of the programs in them."""

import ast
import io
import os
import secrets
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..clock import running_seconds
from .worker import frame, receive

# wall time, of CPU time: generous, because a pause of the machine makes no right program wrong
WALL_FACTOR, WALL_EXTRA_S = 3.0, 5.0
PATIENCE_S = 20.0  # for a worker to start, and to end a program, on a busy machine
PAUSE_S = 1.0  # of the trainer, which may have cost a program its time


def run_tests(
    code: str, tests: Sequence[str], setup: str = "", timeout_s: float = 3.0
) -> list[bool]:
    """Run code in a process of its own, then `setup`, then each test; one verdict per test.

    A test is a statement, such as `assert f(2) == 5`. All of them together have `timeout_s` seconds
    of CPU time, rounded up. After a pause of the job, they run again. Raises OSError if no process
    can be started.
    """
    begun = time.monotonic() - running_seconds()  # grows by pauses alone
    verdicts = run_once(code, tests, setup, timeout_s)
    if not all(verdicts) and time.monotonic() - running_seconds() > begun + PAUSE_S:
        return run_once(code, tests, setup, timeout_s)
    return verdicts


def run_once(code: str, tests: Sequence[str], setup: str, timeout_s: float) -> list[bool]:
    """The verdicts, in which a pause of the job counts like any other time."""
    expressions = [sides(test) for test in tests]
    expected = values_of([right for _, right in expressions], timeout_s)
    with running(timeout_s) as program:
        loaded = program.ask("exec", f"{code}\n{setup}") == [None]
        verdicts = []
        for test, (left, _), value in zip(tests, expressions, expected, strict=True):
            if value:
                verdicts.append(loaded and program.ask("eval", left) == value)
            else:
                verdicts.append(loaded and program.ask("exec", test) == [None])
    return verdicts


def values_of(rights: Sequence[str], timeout_s: float) -> list[list[object]]:
    """[The value of each right side]; [] of one that has none, or no plain one.

    A process without the program evaluates what is no literal: a program could find the values in
    the memory of its own process.
    """
    values = list(map(literal, rights))
    unknown = [number for number, right in enumerate(rights) if right and not values[number]]
    if unknown:
        with running(timeout_s) as other:
            for number in unknown:
                values[number] = other.ask("eval", rights[number])
    return values


def literal(right: str) -> list[object]:
    """[The value of a plain literal]; [] of any other expression."""
    with suppress(Exception):
        value = ast.literal_eval(right)
        frame(value)  # an error if it is not plain
        return [value]
    return []


@contextmanager
def running(timeout_s: float) -> Iterator["Program"]:
    """A new process for a program; its worker ends it, with all that it started."""
    try:
        worker = _idle.pop()
        connection = worker.start()
    except (IndexError, OSError):  # none is idle, or the system has ended it
        worker = Worker()
        connection = worker.start()
    yield Program(connection, timeout_s)
    connection.close()
    with suppress(OSError):
        worker.control.sendall(b"e")
        _idle.append(worker)


class Program:
    """The process of one program, which answers until its time is up."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + WALL_FACTOR * timeout_s + WALL_EXTRA_S
        self.stream = connection.makefile("rwb")
        self.stream.write(frame(timeout_s))  # sent with the first request

    def ask(self, kind: str, source: str) -> list[object]:
        """[The value of an expression, None of statements]; [] if it raises or is not plain."""
        key = secrets.token_hex(8)  # shows that an answer is one
        with suppress(Exception):  # the program may send anything
            self.connection.settimeout(self.deadline - time.monotonic())  # an error if none is left
            self.stream.write(frame((kind, source)) + frame(key))
            self.stream.flush()
            echoed = receive(self.stream)
            answer = receive(self.stream)
            if echoed == key:
                return answer
        return []


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
        message, descriptors, *_ = socket.recv_fds(self.control, 1 << 10, 1)
        if not descriptors:
            raise ConnectionError("the process that runs code has ended")
        unheld = receive(io.BytesIO(message))
        if unheld:
            # with this stacklevel it is said once, wherever programs are run from
            warnings.warn(
                f"the kernel does not keep programs in the sandbox from {' and '.join(unheld)}: "
                "only an audit hook of Python does, which hostile code gets around",
                stacklevel=1,
            )
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

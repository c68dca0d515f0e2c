"""A worker of the sandbox: takes jobs on its standard input, writes verdicts on its output.

It forks the process of the next candidate before the job is read, so that the process is ready when
the code comes. Each job is read and judged in another fork, which ends with it: so no test, of this
job or of earlier ones, is ever in the memory that candidates inherit. The trainer starts workers
with workers.py.
"""

import fcntl
import gc
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from . import candidate, isolation, judge, wire

JOBS, VERDICTS = 0, 1  # file descriptors
PREFIX = "minigrpo-code-"  # of folders
FORK_TRIES, FORK_WAIT_S = 50, 0.1  # while the system allows no more processes
WARM = "math cmath re itertools functools heapq bisect string operator copy typing statistics"
WARM += " datetime textwrap array calendar sys"


def main(namespaces: bool) -> NoReturn:
    """Serve until the trainer closes the pipe, ends, or sends SIGTERM."""
    isolation.be_killed_first()
    isolation.adopt_orphans()
    for name in WARM.split():  # what solutions import, read once for all of them
        __import__(name)
    random.seed(0)  # a run can be repeated
    outside = os.open(tempfile.gettempdir(), os.O_RDONLY)
    folder = _own_folder()
    held = isolation.enter_namespaces(folder) if namespaces else []
    server = os.fork()  # the first process in the new namespace for processes
    if not server:
        os.close(outside)
        _serve(folder, held)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(server, signal.SIGKILL))
    os.close(JOBS)
    os.close(VERDICTS)
    os.waitpid(server, 0)
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    isolation.unmount(folder)
    with suppress(OSError):  # not by its path, which is read-only in here
        os.rmdir(os.path.basename(folder), dir_fd=outside)
    os._exit(0)


def _own_folder() -> str:
    """A new folder, which this process and its children lock; removes those that nobody locks.

    A worker that is killed cannot remove its own.
    """
    for name in os.listdir(tempfile.gettempdir()):
        if name.startswith(PREFIX):
            with suppress(OSError):  # in use, or of another user
                left = os.path.join(tempfile.gettempdir(), name)
                os.close(_lock(left, fcntl.LOCK_NB))
                shutil.rmtree(left)
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(OSError):  # another worker may have removed it before it was locked
            _lock(folder)
            os.stat(folder)
            return folder


def _lock(folder: str, how: int = 0) -> int:
    """The descriptor that holds the lock. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _serve(folder: str, held: list[str]) -> NoReturn:
    try:
        isolation.end_with_parent()
        isolation.adopt_orphans()
        isolation.hide_memory()
        isolation.limit_memory()  # a test may ask a large range of a candidate for a list
        isolation.give_up_privileges()
        isolation.limit_memory()
        os.environ.clear()
        signal.signal(signal.SIGALRM, _raise_out_of_time)
        gc.collect()
        gc.freeze()  # collections in the candidates then copy no memory
        wire.send(VERDICTS, held)
        while True:
            place = tempfile.mkdtemp(dir=folder)
            pid, channel = _start_candidate(place)
            try:
                answer = _judge(channel)
            finally:
                os.close(channel.requests)
                os.close(channel.replies)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _end_all()
                shutil.rmtree(place, ignore_errors=True)
            wire.send(VERDICTS, answer)
    except (EOFError, BrokenPipeError):  # the trainer has ended, or a judge, which has said why
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def _start_candidate(folder: str) -> tuple[int, judge.Channel]:
    """Fork a process that waits for its code. Raises OSError if the system allows none."""
    theirs, requests = os.pipe()
    replies, ours = os.pipe()
    pid = _fork()
    if not pid:
        candidate.run(theirs, ours, folder)
    os.close(theirs)
    os.close(ours)
    return pid, judge.Channel(requests, replies)


def _judge(channel: judge.Channel) -> list[bool]:
    """Have a process read the next job and judge it. Raises EOFError if it gives no verdicts."""
    ours, theirs = os.pipe()
    pid = _fork()
    if not pid:
        said = os.dup(2)
        try:
            isolation.end_with_parent()
            job = wire.receive(JOBS)
            _close_streams()
            wire.send(theirs, _answer(channel, job))
        except EOFError:  # the trainer has ended
            pass
        except BaseException as error:
            os.write(said, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        return [bool(verdict) for verdict in wire.receive(ours)]
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _close_streams() -> None:
    """Let tests read and print nothing: what they print would be taken for verdicts, and warnings
    about their syntax would fill a pipe that nobody reads.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)


def _fork() -> int:
    for _ in range(FORK_TRIES):
        with suppress(BlockingIOError):
            return os.fork()
        time.sleep(FORK_WAIT_S)
    return os.fork()


def _answer(channel: judge.Channel, job: dict[str, Any]) -> list[bool]:
    verdicts = list[bool]()
    timeout_s, tests = job["timeout_s"], job["tests"]
    end = time.monotonic() + timeout_s
    with suppress(judge.OutOfTime), _alarm(timeout_s):
        cpu_s = math.ceil(timeout_s)
        for verdict in judge.run_tests(channel, job["code"], tests, job["setup"], cpu_s):
            # a test that catches every error has caught the end of its time, too
            verdicts.append(verdict and time.monotonic() < end)
    return verdicts + [False] * (len(tests) - len(verdicts))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after some seconds, and repeatedly, if it is caught there."""
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_out_of_time(number: int, frame: FrameType | None) -> NoReturn:
    raise judge.OutOfTime


def _end_all() -> None:
    """Kill every process that was started from here, whatever session it is in."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if os.getpid() == 1:  # nobody else is in this namespace
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            # orphans become children of this process; killing them orphans theirs
            for pid in isolation.children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)

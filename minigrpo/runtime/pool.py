"""Threads and processes that call code of others, each call with a deadline."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ..userfiles import changed_files, files_now, files_read
from .guard import RunFailed
from .watchdog import Watchdog

LATE = "it took longer than its timeout_s"


class Call(NamedTuple):
    key: Hashable
    function: Callable[[], object]
    timeout_s: float
    about: str  # says what is called, and how


class Running(NamedTuple):
    deadline: float
    thread: int


class Outcome(NamedTuple):
    key: Any  # that of `submit`
    result: Any  # None after an error
    error: BaseException | None


class Pool:
    """Calls code of others in `size` threads. They are daemons: none keeps the process alive.

    A call that outlasts its deadline has failed. Its thread is given up for another one.
    """

    def __init__(self, size: int, watchdog: Watchdog) -> None:
        self.size = size
        self.watchdog = watchdog
        self.todo = SimpleQueue[Call | None]()  # None ends a thread
        self.done = SimpleQueue[Outcome]()
        self.running: dict[Hashable, Running] = {}  # by key
        self.num_open = 0  # calls whose outcome has not been taken
        for _ in range(size):
            self._start_thread()

    def close(self) -> None:
        for _ in range(self.size):
            self.todo.put(None)

    def submit(
        self, key: Hashable, function: Callable[[], object], timeout_s: float, about: str
    ) -> None:
        """Call a function, as soon as a thread is free, for at most `timeout_s` seconds."""
        self.num_open += 1
        self.todo.put(Call(key, function, timeout_s, about))

    def ended(self, wait: bool) -> Iterator[Outcome]:
        """Take the calls that have ended; with `wait`, at least one if there is any."""
        while self.num_open:
            outcome = self._next_outcome(wait)
            if outcome:
                self.num_open -= 1
                wait = False
                yield outcome
            elif not wait:
                return

    def all(self) -> Iterator[Outcome]:
        while self.num_open:
            yield from self.ended(wait=True)

    def _next_outcome(self, wait: bool) -> Outcome | None:
        """That of a call that has ended or is late; None if none is, with `wait` after 50 ms."""
        try:
            return self.done.get(wait, timeout=0.05)
        except Empty:
            now = time.monotonic()
            late = [key for key, call in self.running.copy().items() if call.deadline <= now]
        # its thread may just have taken it away
        if not late or not (call := self.running.pop(late[0], None)):
            return None
        self.watchdog.end(call.thread)
        self._start_thread()
        return Outcome(late[0], None, TimeoutError(LATE))

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        thread = threading.get_ident()
        for call in iter(self.todo.get, None):
            self.running[call.key] = Running(time.monotonic() + call.timeout_s, thread)
            try:
                self.watchdog.begin(call.about, call.timeout_s)
                outcome = Outcome(call.key, call.function(), None)
            except BaseException as error:  # sys.exit() too
                outcome = Outcome(call.key, None, error)
            if self.running.pop(call.key, None) is None:
                return  # too late
            self.watchdog.end(thread)
            self.done.put(outcome)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop that awaits the users' functions: one for all, because clients belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def awaited(answer: Awaitable[Any], timeout_s: float) -> Any:
    """The result of an `async` function's call, which is cancelled if it is late."""
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(answer, timeout_s), event_loop())
    try:
        return future.result(timeout_s + 1)
    except TimeoutError:
        if not future.done():  # a call blocks the loop: later ones get another
            event_loop.cache_clear()
        raise


class WorkerProcesses:
    """Processes that call a function of a module or a user's file; a late one is killed alone."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.idle = SimpleQueue[tuple[subprocess.Popen[bytes], Connection]]()

    def call(self, arguments: Sequence[Any], timeout_s: float) -> Any:
        """The function's answer. Raises TimeoutError, and RuntimeError for what it raises."""
        try:
            process, pipe = self.idle.get_nowait()
        except Empty:
            process, pipe = self._start()
        try:
            pipe.send((arguments, timeout_s))
            if not pipe.poll(timeout_s):
                raise TimeoutError(LATE)
            answer, error = pipe.recv()  # EOFError: it has ended
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.idle.put((process, pipe))
        if error:
            raise RuntimeError(error)
        return answer

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        # not by multiprocessing, which would run a script of the user's again
        pipe, theirs = Pipe()
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        pipe.send((sys.path, self.module, self.name))
        try:
            read_anew = pipe.recv()  # it is ready
        except EOFError:  # it has ended: perhaps a file is no longer whole
            read_anew = files_now()
            if not changed_files(read_anew):
                raise
        changed = changed_files(read_anew)
        if changed:
            process.kill()
            process.wait()
            said = "has changed since the run began: restore it, or resume with it as it is"
            raise RunFailed(f"{', '.join(changed)} {said}")
        return process, pipe


def serve(file: int) -> None:
    """A worker process: call the function that is named with the arguments that come."""
    pipe = Connection(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends by itself, and then this process
    sys.path[:], module, name = pipe.recv()
    function = attrgetter(name)(import_module(module))
    pipe.send(files_read())
    with suppress(EOFError):  # the run has ended
        while True:
            arguments, timeout_s = pipe.recv()
            # the system ends this process then, whoever holds Python's lock
            signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
            try:
                pipe.send((function(*arguments), ""))  # nothing, if the answer cannot be pickled
            except BaseException as error:
                pipe.send((None, f"{error!r:.200}"))
            signal.setitimer(signal.ITIMER_REAL, 0)

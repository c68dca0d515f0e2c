"""Threads and processes that call code of others, each call with a deadline."""

import asyncio
import fcntl
import inspect
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from numbers import Real
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ..clock import running_seconds
from ..errors import ConfigError, RunFailed, error_text
from ..userfiles import changed_files, files_now, files_read
from .watchdog import UNMARKED, Watchdog

LATE = "it took longer than its timeout_s"
# what asks a run to stop: Ctrl-C; a scheduler that ends the job; schedulers that warn before they
# do; a terminal that closes
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


def seconds(given: Any) -> float:
    """A deadline that a user gives. Raises ConfigError for what is no number of seconds."""
    if not (isinstance(given, Real) and 0 < float(given) < math.inf):
        raise ConfigError(f"timeout_s must be a number of seconds above 0, got {given!r:.80}")
    return float(given)


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
        self.todo.put(Call(key, function, float(timeout_s), about))
        self.num_open += 1

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
        """The outcome of a call that has ended or is late; None if there is none within 50 ms."""
        try:
            return self.done.get(wait, timeout=0.05)
        except Empty:
            now = running_seconds()
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
            result = error = None
            self.running[call.key] = Running(running_seconds() + call.timeout_s, thread)
            try:
                self.watchdog.begin(call.about, call.timeout_s)
                result = call.function()
            except BaseException as raised:  # sys.exit() too
                error = raised
            if self.running.pop(call.key, None) is None:
                return  # too late
            self.done.put(Outcome(call.key, result, error))
            self.watchdog.end(thread)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop that awaits the users' functions: one for all, because clients belong to a loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a call, which alone has failed
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop


def awaited(answer: Awaitable[Any], timeout_s: float) -> Any:
    """The result of an `async` function's call, which is cancelled if it is late."""

    async def call() -> Any:
        return await answer

    loop = event_loop()
    future = asyncio.run_coroutine_threadsafe(call(), loop)
    if is_late(future, timeout_s):
        future.cancel()
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        if is_late(turn, 1.0) and event_loop() is loop:  # the call blocks the loop
            event_loop.cache_clear()  # later calls get another
        raise TimeoutError(LATE)
    return future.result()


def is_late(future: Future[Any], timeout_s: float) -> bool:
    """Wait for a future; whether it is still not done."""
    deadline = running_seconds() + timeout_s
    while not future.done() and (left := deadline - running_seconds()) > 0:
        wait([future], timeout=left)
    return not future.done()


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
            pipe.send(arguments)
            deadline = running_seconds() + timeout_s
            while not pipe.poll(max(0.0, min(1.0, deadline - running_seconds()))):
                if running_seconds() >= deadline:
                    raise TimeoutError(LATE)
            result, error, read_anew = pipe.recv()  # EOFError: it has ended
            answer = pickle.loads(result)
            refuse_changes(read_anew)
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
        # a signal to the process group of the run is for the run alone
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        pipe.send((sys.path, self.module, self.name))
        try:
            read_anew = pipe.recv()  # it is ready
        except EOFError:  # it has ended, perhaps because a file is no longer whole
            own = getattr(sys.modules.get(self.module), "__file__", "")
            # if it is not a user's, or all are as they were, the call fails
            read_anew = files_now() if own in files_read() else {}
        try:
            refuse_changes(read_anew)
        except RunFailed:
            process.kill()
            process.wait()
            raise
        return process, pipe


def refuse_changes(read: Mapping[str, str]) -> None:
    """Raise RunFailed if users' files are not as they were when the run first read them."""
    changed = changed_files(read)
    if changed:
        said = "has changed since the run began: restore it, or resume with it as it is"
        raise RunFailed(f"{', '.join(changed)} {said}")


def serve(file: int) -> None:
    """A worker process: call the function that is named with the arguments that come.

    It ends when its connection does, so it takes no notice of signals that ask the run to stop.
    What the function starts or forks has their default actions.
    """
    handle_stop_signals(lambda number, frame: None)
    os.register_at_fork(after_in_child=partial(handle_stop_signals, signal.SIG_DFL))
    pipe = Connection(file)
    sys.path[:], module, name = pipe.recv()
    function = attrgetter(name)(import_module(module))
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    pipe.send(files_read())
    num_modules = len(sys.modules)
    with suppress(EOFError, OSError):  # the run has ended
        while True:
            arguments = pipe.recv()
            # if the run ends meanwhile, SIGIO ends this process, whoever holds Python's lock
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_ASYNC)
            try:
                result, said = pickle.dumps(function(*arguments)), ""
            except BaseException as error:  # perhaps the answer cannot be pickled
                result, said = pickle.dumps(None), error_text(error)
            # the function may import more when it is called
            read = files_read() if len(sys.modules) != num_modules else {}
            num_modules = len(sys.modules)
            fcntl.fcntl(file, fcntl.F_SETFL, 0)
            pipe.send((result, said, read))


def handle_stop_signals(action: Any) -> None:
    for name in STOP_SIGNALS:
        signal.signal(signal.Signals[name], action)


def called(function: Callable[[], object], timeout_s: float, about: str) -> Outcome:
    """The outcome of a single call; after `timeout_s` seconds its thread is given up."""
    pool = Pool(1, UNMARKED)
    pool.submit(about, function, timeout_s, about)
    (outcome,) = pool.all()
    pool.close()
    return outcome


def finished(answer: Any, timeout_s: float) -> Any:
    """What a call in a pool has returned; the answer of an `async` function is awaited.

    The pool's deadline, which is `timeout_s` too, comes first and decides. Then the function is
    cancelled.
    """
    return awaited(answer, timeout_s + 1) if inspect.isawaitable(answer) else answer

"""Calls of others' code, each with a deadline: in threads, or in processes that can be killed."""

import asyncio
import fcntl
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ..errors import RunFailed, error_text
from ..userfiles import files_read, sha256_of
from . import hangs

LATE = "it took longer than its timeout_s"
# The signals that ask a run to stop: Ctrl-C, a scheduler that ends the job, schedulers that warn
# before they do, and a terminal that closes.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@dataclass(eq=False)
class Call:
    """A call that is waiting for a thread, or in work."""

    key: Any
    function: Callable[[], object]
    timeout_s: float


class Outcome(NamedTuple):
    key: Any  # what `submit` was given
    result: Any  # None after an error
    error: BaseException | None


class Pool:
    """Threads that call code of others, `size` at a time.

    A call that outlasts its deadline has failed, and another thread takes the place of its thread.
    All are daemons, so that none keeps the process alive.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.todo = SimpleQueue[Call | None]()  # None ends a thread
        self.done = SimpleQueue[Outcome]()
        self.deadlines: dict[Call, float] = {}  # deadline of each call in work
        self.num_open = 0  # calls whose outcome has not been taken
        for _ in range(size):
            self._start_thread()

    def close(self) -> None:
        """End the threads when their calls have ended. Those that have not begun are dropped."""
        self.drop()
        for _ in range(self.size):
            self.todo.put(None)

    def drop(self) -> None:
        """Forget the calls that have not begun."""
        with suppress(Empty):
            while self.num_open:
                self.todo.get_nowait()
                self.num_open -= 1

    def submit(self, key: Any, function: Callable[[], object], timeout_s: float) -> None:
        """Call a function, as soon as a thread is free, for at most `timeout_s` seconds."""
        self.todo.put(Call(key, function, float(timeout_s)))
        self.num_open += 1

    def ended(self, wait: bool) -> Iterator[Outcome]:
        """Take the calls that have ended. With `wait`, take at least one if any is open."""
        while self.num_open:
            outcome = self._next_outcome(wait)
            if outcome:
                self.num_open -= 1
                wait = False
                yield outcome
            elif not wait:
                return

    def all(self) -> Iterator[Outcome]:
        """Take all calls, as they end."""
        while self.num_open:
            yield from self.ended(wait=True)

    def _next_outcome(self, wait: bool) -> Outcome | None:
        """The outcome of a call that has ended or is late, or None after 50 ms without one."""
        with suppress(Empty):
            return self.done.get(wait, timeout=0.05)
        now = time.monotonic()
        for call, deadline in self.deadlines.copy().items():
            if deadline <= now and self._take_out(call):
                self._start_thread()
                return Outcome(call.key, None, TimeoutError(LATE))
        return None

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        """The work of a thread: calls, until there are no more or one of them was late."""
        for call in iter(self.todo.get, None):
            self.deadlines[call] = time.monotonic() + call.timeout_s
            hangs.note_begin(call, call.timeout_s)
            result = error = None
            try:
                result = call.function()
            except BaseException as raised:  # sys.exit() too
                error = raised
            if not self._take_out(call):
                return  # another thread has this one's place
            self.done.put(Outcome(call.key, result, error))

    def _take_out(self, call: Call) -> bool:
        """End a call's time in work. False if it had ended, because the call was late."""
        hangs.note_end(call)
        return self.deadlines.pop(call, None) is not None


def called(function: Callable[[], object], timeout_s: float) -> Outcome:
    """The outcome of a single call. It fails after `timeout_s` seconds."""
    pool = Pool(1)
    pool.submit(None, function, timeout_s)
    (outcome,) = pool.all()
    pool.close()
    return outcome


def finished(answer: Any, timeout_s: float) -> Any:
    """The answer of a call. That of an `async` function is awaited, or cancelled if it is late.

    `Pool` limits the time of other functions.
    """
    if not inspect.isawaitable(answer):
        return answer
    limited = asyncio.wait_for(answer, timeout_s + 1)
    with _making_loop:
        loop = event_loop()
    return asyncio.run_coroutine_threadsafe(limited, loop).result()


_making_loop = threading.Lock()  # threads that ask for the first loop at once would make several


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop that awaits users' functions. All share one, because clients belong to a loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a call, which alone has failed
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop


class WorkerProcesses:
    """Processes that call a function of a module or a user's file. A late call ends its own."""

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
            if not pipe.poll(min(timeout_s, hangs.LONGEST_S)):
                raise TimeoutError(LATE)
            result, error_said = pipe.recv()  # EOFError: it has ended
            answer = pickle.loads(result)
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.idle.put((process, pipe))
        if error_said:
            raise RuntimeError(error_said)
        return answer

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        """A process that has imported the function, and the connection to it."""
        # multiprocessing would run a script of the user's again
        pipe, theirs = Pipe()
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        # a signal to the process group of the run is for the run alone
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        pipe.send((sys.path, self.module, self.name))
        first_read = files_read()
        try:
            read_anew = pipe.recv()  # it is ready
        except EOFError:  # it has ended, perhaps because a file is no longer whole
            read_anew = {file: sha256_of(file) for file in first_read}
        changed = [file for file, sha in read_anew.items() if first_read.get(file, sha) != sha]
        if changed:  # with the error, the connection and then the process end
            advice = "has changed since the run began: restore it, or resume with it as it is"
            raise RunFailed(f"{', '.join(changed)} {advice}")
        return process, pipe


def serve(file: int) -> None:
    """The program of a worker process, which ends when its connection does."""
    # 1. Import the function. A signal that asks the run to stop is for what it forks alone.
    handle_stop_signals(lambda number, frame: None)
    os.register_at_fork(after_in_child=partial(handle_stop_signals, signal.SIG_DFL))
    pipe = Connection(file)
    sys.path[:], module, name = pipe.recv()
    function = attrgetter(name)(import_module(module))
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    pipe.send(files_read())

    # 2. Call it.
    with suppress(EOFError, OSError):  # the run has ended
        while True:
            arguments = pipe.recv()
            # if the run ends meanwhile, SIGIO ends this process, whoever holds Python's lock
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_ASYNC)
            error_said = ""
            try:
                result = pickle.dumps(function(*arguments))
            except BaseException as error:  # perhaps the answer cannot be pickled
                result = pickle.dumps(None)
                error_said = error_text(error)
            fcntl.fcntl(file, fcntl.F_SETFL, 0)
            pipe.send((result, error_said))


def handle_stop_signals(action: Any) -> None:
    for name in STOP_SIGNALS:
        signal.signal(signal.Signals[name], action)

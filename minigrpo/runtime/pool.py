"""Threads that call code of others, each call with a deadline."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from . import hangs
from .processes import LATE


@dataclass(eq=False)
class Call:
    """A call that is waiting for a thread, or in work."""

    key: Any
    function: Callable[[], object]
    timeout_s: float


class Outcome(NamedTuple):
    """The end of a call."""

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
        """End the threads when their calls have ended."""
        for _ in range(self.size):
            self.todo.put(None)

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
    """The result of a call in a pool, whose deadline is `timeout_s` too and comes first.

    The answer of an `async` function is awaited, or cancelled if it is late.
    """
    if not inspect.isawaitable(answer):
        return answer
    limited = asyncio.wait_for(answer, timeout_s + 1)
    return asyncio.run_coroutine_threadsafe(limited, event_loop()).result()


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

"""Threads that call code of others, each call with a deadline."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class Call(NamedTuple):
    """What a thread is to do."""

    key: Hashable
    function: Callable[[], object]
    timeout_s: float


class Outcome(NamedTuple):
    """How a call has ended."""

    key: Any  # that of `submit`
    result: Any  # None after an error
    error: BaseException | None


class Pool:
    """Calls code of others in `size` threads. They are daemons: none keeps the process alive.

    A call that outlasts its deadline has failed. Its thread is given up for another one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.todo = SimpleQueue[Call | None]()  # None ends a thread
        self.done = SimpleQueue[Outcome]()
        self.deadlines: dict[Hashable, float] = {}  # of the calls that run, by key
        self.num_open = 0  # calls whose outcome has not been taken
        for _ in range(size):
            self._start_thread()

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self.size):
            self.todo.put(None)

    def submit(self, key: Hashable, function: Callable[[], object], timeout_s: float) -> None:
        """Call a function, as soon as a thread is free, for at most `timeout_s` seconds."""
        self.num_open += 1
        self.todo.put(Call(key, function, timeout_s))

    def ended(self, wait: bool) -> Iterator[Outcome]:
        """Take the calls that have ended; with `wait`, at least one if there is any."""
        must_wait = wait
        while self.num_open:
            outcome = self._next_outcome(must_wait)
            if outcome:
                self.num_open -= 1
                must_wait = False
                yield outcome
            elif not must_wait:
                return

    def all(self) -> Iterator[Outcome]:
        """Take all calls, as they end."""
        while self.num_open:
            yield from self.ended(wait=True)

    def _next_outcome(self, wait: bool) -> Outcome | None:
        """That of a call that has ended or is late; None if none is, with `wait` after 50 ms."""
        try:
            return self.done.get(wait, timeout=0.05)
        except Empty:
            now = time.monotonic()
            late = [key for key, until in self.deadlines.copy().items() if until <= now]
        # its thread may just have taken it away
        if not late or self.deadlines.pop(late[0], None) is None:
            return None
        self._start_thread()
        return Outcome(late[0], None, TimeoutError("it took longer than its timeout_s"))

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for call in iter(self.todo.get, None):
            self.deadlines[call.key] = time.monotonic() + call.timeout_s
            try:
                outcome = Outcome(call.key, call.function(), None)
            except BaseException as error:  # sys.exit() too
                outcome = Outcome(call.key, None, error)
            if self.deadlines.pop(call.key, None) is None:
                return  # too late
            self.done.put(outcome)

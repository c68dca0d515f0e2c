"""Threads that call code of others, each call with a deadline."""

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

WAIT_S = 0.05  # between two looks at the deadlines
Outcome = tuple[Any, Any, BaseException | None]  # the key of a call, its result, its error


class Pool:
    """Calls code of others in `size` threads. They are daemons: none keeps the process alive.

    A call that outlasts its deadline has failed. Its thread is given up for another one.
    """

    def __init__(self, size: int) -> None:
        self.todo, self.done = SimpleQueue[Any](), SimpleQueue[Outcome]()
        self.deadlines: dict[Any, float] = {}  # of the calls that run, by key
        self.num_open = 0  # calls whose outcome has not been taken
        self.size = size
        for _ in range(size):
            self._start_thread()

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self.size):
            self.todo.put(None)

    def submit(self, key: Any, function: Callable[[], Any], timeout_s: float) -> None:
        """Call a function, as soon as a thread is free, for at most `timeout_s` seconds."""
        self.num_open += 1
        self.todo.put((key, function, timeout_s))

    def ended(self, wait: bool) -> Iterator[Outcome]:
        """Take the calls that have ended; with `wait`, at least one if there is any."""
        while self.num_open:
            try:
                outcome = self.done.get(wait, WAIT_S)
            except Empty:
                now, running = time.monotonic(), self.deadlines.copy()
                late = [key for key, until in running.items() if until <= now]
                # its thread may just have taken it away
                if not late or self.deadlines.pop(late[0], None) is None:
                    if wait:
                        continue
                    return
                self._start_thread()
                outcome = late[0], None, TimeoutError("it took longer than its timeout_s")
            self.num_open, wait = self.num_open - 1, False
            yield outcome

    def all(self) -> Iterator[Outcome]:
        """Take all calls, as they end."""
        while self.num_open:
            yield from self.ended(wait=True)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for key, function, timeout_s in iter(self.todo.get, None):
            self.deadlines[key] = time.monotonic() + timeout_s
            outcome: Outcome
            try:
                outcome = key, function(), None
            except BaseException as error:  # sys.exit() too
                outcome = key, None, error
            if self.deadlines.pop(key, None) is None:
                return  # too late
            self.done.put(outcome)

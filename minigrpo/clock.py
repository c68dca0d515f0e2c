"""The clock of all deadlines: it stands still while a job is paused, by Ctrl-Z or by sleep."""

import os
import threading
import time
from functools import cache

TICK_S = 0.1
LONGEST_TICK_S = 0.5  # the most that a tick counts; in a longer one the process was stopped


class Clock:
    def __init__(self) -> None:
        self.tick = 0.0, time.monotonic()  # seconds counted so far, and the time of the count
        threading.Thread(target=self._run, daemon=True).start()

    def seconds(self) -> float:
        counted, counted_at = self.tick
        return counted + min(time.monotonic() - counted_at, LONGEST_TICK_S)

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.tick = self.seconds(), time.monotonic()


clock = cache(Clock)
os.register_at_fork(after_in_child=clock.cache_clear)  # a child process has no such thread


def running_seconds() -> float:
    """The seconds in which this process ran, since an arbitrary moment."""
    return clock().seconds()

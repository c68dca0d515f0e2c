"""The clock of all deadlines: the seconds in which this process ran.

No time passes on it while a job is paused, as by Ctrl-Z, a frozen container or a laptop that
sleeps. So a pause makes no call late.
"""

import os
import threading
import time
from functools import cache

TICK_S = 0.1
LONGEST_TICK_S = 0.5  # what counts of a tick that took longer: the process was stopped


class Clock:
    """Counts seconds in a daemon thread."""

    def __init__(self) -> None:
        self.tick = 0.0, time.monotonic()  # the seconds counted so far, and when
        threading.Thread(target=self._run, daemon=True).start()

    def seconds(self) -> float:
        counted, at = self.tick
        return counted + min(time.monotonic() - at, LONGEST_TICK_S)

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.tick = self.seconds(), time.monotonic()


clock = cache(Clock)
os.register_at_fork(after_in_child=clock.cache_clear)  # a child has none of the threads


def running_seconds() -> float:
    """The seconds in which this process ran, since an arbitrary moment."""
    return clock().seconds()

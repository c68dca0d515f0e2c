"""The end of a process in which a call holds Python's lock for too long, and a trace of it.

Threads, deadlines and signal handlers wait for a call that holds the interpreter lock (GIL), such
as a regex that backtracks. The handlers of `faulthandler` do not. So a thread sets two timers again
and again while calls are in work. If it cannot get the lock, the first timer writes a trace of all
threads into the run's folder, and the second one prints it and ends the process. A resume finds the
trace: see `in_worker_processes`.

The timers count the CPU time of the process, which stands still while the job is paused. A call
that holds the lock and only waits is therefore not noticed.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

TRACE = "hung_call.txt"  # the file in a run's folder
BEAT_S = 0.2  # seconds after which the timers are set again
GRACE_S = 4.0  # seconds of CPU time beyond the longest timeout, for each thread of torch
LONGEST_S = 1e6  # seconds that the system takes for a timer; a timeout may be longer

timeouts: dict[object, float] = {}  # the timeout_s of each call in work
nowhere = open(os.devnull, "wb")


@contextmanager
def tracing(folder: Path) -> Iterator[None]:
    """Have traces written into a run's folder, and remove their file at the end if it is empty."""
    start()
    with open(folder / TRACE, "ab") as file:
        faulthandler.register(signal.SIGPROF, file=file)
        try:
            yield
        finally:
            faulthandler.register(signal.SIGPROF, file=nowhere)
    if not has_trace(folder):
        (folder / TRACE).unlink(missing_ok=True)


def has_trace(folder: Path) -> bool:
    """Whether a call has ended a process of the run in this folder."""
    file = folder / TRACE
    return file.is_file() and file.stat().st_size > 0


def note_begin(call: object, timeout_s: float) -> None:
    start()
    timeouts[call] = timeout_s
    set_timers()


def note_end(call: object) -> None:
    """Note that a call has ended, or that nobody waits for it any longer."""
    timeouts.pop(call, None)
    set_timers()


def set_timers() -> None:
    """Let the timers run out after the longest timeout, or stop them if no call is in work."""
    to_trace = to_end = 0.0
    if in_work := timeouts.copy():
        # threads that compute outside the lock use CPU time too
        grace = GRACE_S * torch.get_num_threads()
        to_trace = min(max(in_work.values()), LONGEST_S) + grace
        to_end = to_trace + 1
    signal.setitimer(signal.ITIMER_PROF, to_trace)
    signal.setitimer(signal.ITIMER_VIRTUAL, to_end)


@cache
def start() -> None:
    """Say what happens when the timers run out, and start the thread that sets them."""
    faulthandler.register(signal.SIGPROF, file=nowhere)
    faulthandler.register(signal.SIGVTALRM, file=2, chain=True)  # then the signal ends the process

    def run() -> None:
        while True:
            time.sleep(BEAT_S)
            set_timers()

    threading.Thread(target=run, daemon=True).start()


os.register_at_fork(after_in_child=start.cache_clear)  # a child has none of the threads

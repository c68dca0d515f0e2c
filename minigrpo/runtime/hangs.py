"""The end of a process in which a call holds Python's lock for too long.

Threads, deadlines and signal handlers wait for a call that holds the interpreter lock (GIL), such
as a regex that backtracks. The handlers of `faulthandler` do not. So a thread sets a timer again
and again while calls are in work. If it cannot get the lock, the timer runs out: stderr gets a
trace of all threads, and the process ends.

The timer counts the CPU time of the process, which stands still while the job is paused. A call
that holds the lock and only waits is therefore not noticed.
"""

import faulthandler
import os
import signal
import threading
import time
from functools import cache

import torch

BEAT_S = 0.2  # seconds after which the timer is set again
GRACE_S = 4.0  # seconds of CPU time beyond the longest timeout, for each thread of torch
LONGEST_S = 1e6  # seconds that the system takes for a timer; a timeout may be longer

timeouts: dict[object, float] = {}  # the timeout_s of each call in work


def note_begin(call: object, timeout_s: float) -> None:
    start()
    timeouts[call] = timeout_s
    set_timer()


def note_end(call: object) -> None:
    """Note that a call has ended, or that nobody waits for it any longer."""
    timeouts.pop(call, None)
    set_timer()


def set_timer() -> None:
    """Let the timer run out after the longest timeout, or stop it if no call is in work."""
    seconds = 0.0
    if in_work := timeouts.copy():
        # threads that compute outside the lock use CPU time too
        grace = GRACE_S * torch.get_num_threads()
        seconds = min(max(in_work.values()), LONGEST_S) + grace
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


@cache
def start() -> None:
    """Say what happens when the timer runs out, and start the thread that sets it."""
    faulthandler.register(signal.SIGVTALRM, file=2, chain=True)  # then the signal ends the process

    def run() -> None:
        while True:
            time.sleep(BEAT_S)
            set_timer()

    threading.Thread(target=run, daemon=True).start()


os.register_at_fork(after_in_child=start.cache_clear)  # a child has none of the threads

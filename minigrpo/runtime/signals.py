"""Stop on a signal: finish the step or break off the evaluation, save, and exit with code 0."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..types import Warn
from .distributed import DistContext
from .pool import STOP_SIGNALS

REASONS = ("", *STOP_SIGNALS)
SAME_REQUEST = 1.0  # seconds: the terminal and the launcher may both send the same signal


class Stopped(KeyboardInterrupt):
    """A request to stop has broken off an evaluation or a step, before it changed anything.

    Code of others that catches any Exception lets it pass.
    """


class StopRequest(ExitStack):
    """Context manager that catches signals. The first asks to stop; a later one stops at once."""

    def __init__(self, say: Warn) -> None:
        super().__init__()  # a stack of callbacks, which restore the former handlers
        self.say = say
        self.reason = ""  # one of REASONS, the first signal that came
        self.asked_at = 0.0
        self.breaks_off = False  # whether the first signal raises Stopped

    def __enter__(self) -> "StopRequest":
        self.reason = ""
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in (signal.Signals[name] for name in REASONS[1:]):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    before = signal.signal(number, self._caught)
                    self.callback(signal.signal, number, before)
        return self

    def agreed(self, dist: DistContext) -> str:
        """Why to stop, or ""; a collective: the same in all processes, if only one got a signal."""
        return REASONS[int(dist.max(torch.tensor(REASONS.index(self.reason))))]

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Work that the first signal breaks off at once: it raises Stopped."""
        try:
            self.breaks_off = True
            self._check()  # it may have come before
            yield
            self._check()  # code of others may have caught it
        finally:
            self.breaks_off = False

    def _check(self) -> None:
        if self.reason:
            raise Stopped(self.reason)

    def _caught(self, number: int, frame: object) -> None:
        if not self.reason:
            self.reason = signal.Signals(number).name
            self.asked_at = time.monotonic()
            doing = "breaking off the evaluation" if self.breaks_off else "finishing this step"
            self.say(f"{self.reason}: {doing} and saving; a later one stops at once")
            if self.breaks_off:
                raise Stopped(self.reason)
        elif time.monotonic() - self.asked_at > SAME_REQUEST:
            raise KeyboardInterrupt  # safe, because checkpoints are atomic; `fit` saves

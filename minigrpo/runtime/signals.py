"""Signals that stop a run: it ends its step or breaks off its evaluation, and saves."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..types import Warn
from .calls import STOP_SIGNALS
from .distributed import DistContext

REASONS = ("", *STOP_SIGNALS)
SAME_REQUEST = 1.0  # seconds within which the terminal and the launcher may send one request


class Stopped(KeyboardInterrupt):
    """A request to stop has broken off an evaluation or a step, before it changed anything.

    It is not an Exception, so that users' code does not catch it by chance.
    """


class StopRequest(ExitStack):
    """A context that catches signals. The first one asks to stop; a later one stops at once."""

    def __init__(self, say: Warn) -> None:
        super().__init__()  # a stack of callbacks, which restore the former handlers
        self.say = say
        self.reason = ""  # one of REASONS, the first signal that came
        self.asked_at = 0.0
        self.breaks_off = False  # whether the first signal raises Stopped

    def __enter__(self) -> "StopRequest":
        self.reason = ""
        if threading.current_thread() is not threading.main_thread():  # it may set no handlers
            return self
        for name in STOP_SIGNALS:
            number = signal.Signals[name]
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                before = signal.signal(number, self._caught)
                self.callback(signal.signal, number, before)
        return self

    def agreed(self, dist: DistContext) -> str:
        """The reason to stop, or "". It is the same in all processes, even if one got a signal."""
        own = torch.tensor(REASONS.index(self.reason))
        return REASONS[int(dist.max(own))]

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """A context for work that the first signal breaks off at once, by raising Stopped."""
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
            doing = "breaking off the evaluation" if self.breaks_off else "ending this step"
            self.say(f"{self.reason}: {doing} and saving; a later one stops at once")
            if self.breaks_off:
                raise Stopped(self.reason)
        elif time.monotonic() - self.asked_at > SAME_REQUEST:
            raise KeyboardInterrupt  # safe, because checkpoints are atomic; `fit` saves

"""Stop on a signal: finish the step, save, and exit with code 0."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from ..types import Warn
from .distributed import DistContext

# Ctrl-C; a scheduler that ends the job; schedulers that warn before they do; a terminal that closes
REASONS = ("", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
# seconds; the terminal and the launcher may both send the same signal, which is one request
SAME_REQUEST = 1.0


class StopRequest:
    """Context manager that catches signals. The first asks to stop; a later one stops at once."""

    def __init__(self, say: Warn) -> None:
        self.say, self.reason, self.asked_at = say, "", 0.0
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in (signal.Signals[name] for name in REASONS[1:]):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self.handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def agreed(self, dist: DistContext) -> str:
        """Why to stop, or ""; the same in all processes, even if only one got a signal.

        This is a collective: every process must call it.
        """
        return REASONS[int(dist.max(torch.tensor(REASONS.index(self.reason))))]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason, self.asked_at = signal.Signals(number).name, time.monotonic()
            self.say(f"{self.reason}: finishing this step and saving; a later one stops at once")
        elif time.monotonic() - self.asked_at > SAME_REQUEST:
            raise KeyboardInterrupt  # safe, because checkpoints are atomic; `fit` saves

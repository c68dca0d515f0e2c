"""Being asked to stop: the step is finished, everything is saved, and the process exits as if all
was well.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from .distributed import DistContext

REASONS = (
    "",
    "SIGINT",
    "SIGTERM",
    "SIGUSR1",
)  # Ctrl-C; a scheduler that takes the machine back; one that warns ahead
SAME_REQUEST = (
    1.0  # seconds: a signal that comes twice at once, from terminal and launcher, is one request
)


class StopRequest:
    """Catches signals while it is entered. The first asks; another one, later, stops at once."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say, self.reason, self.asked_at = say, "", 0.0
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if (
            threading.current_thread() is threading.main_thread()
        ):  # no other thread may set handlers
            for name in REASONS[1:]:
                if number := getattr(signal, name, None):
                    self.handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers.clear()

    def agreed(self, dist: DistContext) -> str:
        """Why to stop, or "": the same in all processes, if only one of them was asked. A
        collective.
        """
        return REASONS[int(dist.max(torch.tensor(REASONS.index(self.reason))))]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason, self.asked_at = signal.Signals(number).name, time.monotonic()
            self.say(f"{self.reason}: finishing this step, then saving; once more stops at once")
        elif time.monotonic() - self.asked_at > SAME_REQUEST:
            raise KeyboardInterrupt  # checkpoints are whole or not there

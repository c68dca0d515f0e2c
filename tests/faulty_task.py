"""A task that fails once, in one process, when it is asked for one example.

Environment variables say how: FAULT (kill, raise, hang or wait), FAULT_RANK (the rank that fails),
FAULT_AFTER (seconds to wait first), FAULT_MARKER (a file whose existence shows that it has failed).
"""

import os
import signal
import threading
import time
from pathlib import Path

from minigrpo.types import Example


class Faulty:
    parts = {"length": 1.0}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        marker = Path(os.environ.get("FAULT_MARKER", os.devnull))
        if (
            number == 50
            and threading.current_thread() is not threading.main_thread()  # not at the check
            and os.environ.get("RANK") == os.environ.get("FAULT_RANK", "1")
            and not marker.exists()
        ):
            marker.touch()
            time.sleep(float(os.environ.get("FAULT_AFTER", "0")))
            match os.environ.get("FAULT"):
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise RuntimeError("out of luck")
                case "hang":
                    time.sleep(1000)
                case "wait":
                    time.sleep(0.2)
        return Example(f"{number}:", str(number % 7), index=number)

    def held_out(self, number: int) -> Example:
        return Example(f"h{number}:", str(number % 7), index=number)

    def score(self, example: Example, text: str) -> dict[str, float]:
        return {"length": min(1.0, len(text) / 20)}

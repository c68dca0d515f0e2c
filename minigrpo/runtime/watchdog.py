"""A process beside the run, which ends the run when code of others holds Python's lock too long.

Nothing inside a process can stop a call that holds the interpreter lock (GIL), such as a regex that
backtracks: other threads, deadlines and signal handlers all wait for it. So this file runs by
itself too, without the package. It kills a run that gives no sign of life for longer than a call
may take; first it marks the call in a file, and who resumes the run counts it as failed.
"""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

BEAT_S = 0.2  # between signs of life
GRACE_S = 4.0  # of silence, beyond the deadline of a call


class Watchdog:
    """The run's side: says which calls are in work."""

    def __init__(self, marks: Path | None = None) -> None:
        """`marks`: where calls are marked that have ended a process; None: nowhere."""
        self.marks = marks
        lines = marks.read_bytes().splitlines() if marks and marks.is_file() else ()
        self.marked = set[str]()
        for line in lines:
            with suppress(ValueError, TypeError, LookupError):  # a full disk leaves half a line
                self.marked.add(json.loads(line)["key"])

    def begin(self, about: str, timeout_s: float) -> None:
        """This thread begins a call. Raises TimeoutError if it has ended a process before."""
        key = hashlib.sha256(about.encode(errors="replace")).hexdigest()[:16]
        if key in self.marked:
            raise TimeoutError("it held Python's lock for too long, and ended an earlier process")
        send(
            thread=threading.get_ident(),
            system_thread=threading.get_native_id(),
            key=key,
            about=about if len(about) < 600 else f"{about[:200]} ... {about[-400:]}",
            timeout_s=timeout_s,
            marks=str(self.marks or os.devnull),
        )

    def end(self, thread: int) -> None:
        """The call in a thread has ended, or nobody waits for it any longer."""
        send(thread=thread)


UNMARKED = Watchdog()
lock = threading.Lock()  # one process, and whole lines


def send(**message: Any) -> None:
    with lock, suppress(Exception):  # if there is no other process (any more), the run goes on
        pipe = other_process().stdin
        assert pipe
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()


@cache
def other_process() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def beat() -> None:
        while process.poll() is None:
            time.sleep(BEAT_S)
            send()

    threading.Thread(target=beat, daemon=True).start()
    return process


def watch(run: int) -> None:
    """The other process: watch the process `run` until it ends."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)  # the run saves itself first
    calls: dict[int, dict[str, Any]] = {}  # in work, by thread
    rest = b""
    silence_s = 0  # while the whole job is stopped, no time passes
    while True:
        if select.select([0], [], [], 1.0)[0]:
            silence_s = 0
            if not (read := os.read(0, 1 << 16)):
                return  # the run has ended
            *lines, rest = (rest + read).split(b"\n")
            for message in filter(None, map(json.loads, lines)):
                calls.pop(message["thread"], None)
                if "key" in message:
                    calls[message["thread"]] = message
            continue
        if state(Path(f"/proc/{run}")) in ("T", "t"):  # the run alone is stopped, as by SIGSTOP
            continue
        silence_s += 1
        late = [call for call in calls.values() if call["timeout_s"] + GRACE_S < silence_s]
        threads = Path(f"/proc/{run}/task")
        # the calls that compute, rather than wait for Python's lock
        busy = [call for call in late if state(threads / str(call["system_thread"])) == "R"]
        late = busy or late
        for call in late:
            with open(call["marks"], "a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(call)}\n")  # after half a line, too
            said = f"took longer than {call['timeout_s']:g} s and let nothing else run"
            print(f"error: {call['about']}: {said}; the run is killed", file=sys.stderr)
        if late:
            os.kill(run, signal.SIGKILL)
            return


def state(folder: Path) -> str:
    """The letter of a process or thread in /proc; empty on a system without it."""
    with suppress(OSError):
        return (folder / "stat").read_text().rpartition(") ")[2][:1]
    return ""


if __name__ == "__main__":
    watch(int(sys.argv[1]))

"""Warm workers, in which the trainer runs code that a model wrote.

A thread that runs code has a worker to itself meanwhile: as many programs run at a time as threads
ask (`--num-reward-workers`).
"""

import atexit
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import wire
from .wire import FILES, NETWORK, PROCESSES

PACKAGE = Path(__file__).parent.parent
START_S = 20.0  # for a worker to start, on a busy machine
GRACE_S = 5.0  # beyond the wall time, for a worker to answer
TRIES = 2  # of a job whose worker breaks
MAX_CODE_CHARS = 100_000  # longer code fails its tests
HARMLESS = {"code": "", "tests": ["assert True"], "setup": "", "timeout_s": 3.0}
# imports only the sandbox: the package itself would import torch
START = """
import sys, types
package = types.ModuleType("minigrpo")
package.__path__ = [sys.argv[1]]
sys.modules["minigrpo"] = package
from minigrpo.sandbox import server
server.main(namespaces="plain" not in sys.argv)
"""
MISSING = {
    NETWORK: "may use the network",
    PROCESSES: "may see other processes",
    FILES: "may change files",
}


class SandboxError(RuntimeError):
    """Code cannot be run at all. The message is one line."""


class BrokenWorkerError(SandboxError):
    """A worker has ended, or does not answer. The message is one line."""


def check_system() -> None:
    """Raise SandboxError, which says what is missing, unless code can be run on this system."""
    if sys.platform != "linux":
        raise SandboxError(
            f"code that a model wrote runs on Linux only; {sys.platform} has no namespaces, and no "
            "way to end all that a process has started"
        )


class Worker:
    """A process that runs one candidate after another."""

    def __init__(self, namespaces: bool = True) -> None:
        """Start it, in namespaces if the system allows them. Raises SandboxError if that fails."""
        check_system()
        # no site-packages, nothing of the user's environment, the same hashes in every run
        flags = ["-s", "-S", "-P", "-B"]
        kept = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TMPDIR")}
        try:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", START, str(PACKAGE), *["plain"] * (not namespaces)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={**kept, "PYTHONHASHSEED": "0"},
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        except OSError as error:  # no more processes, files or memory
            reason = error.strerror or error
            raise SandboxError(f"the process that runs code does not start: {reason}") from None
        try:
            self.held: Sequence[str] = self._receive(START_S)
        except Exception as error:
            self.close()
            raise SandboxError(f"the process that runs code does not start: {error}") from None

    def run(self, job: dict[str, Any]) -> list[bool]:
        """Return the verdict of each test. Raises BrokenWorkerError."""
        try:
            assert self.process.stdin
            wire.send(self.process.stdin.fileno(), job)
            return [bool(verdict) for verdict in self._receive(job["timeout_s"] + GRACE_S)]
        except Exception as error:
            self.close()
            raise BrokenWorkerError(f"the process that runs code broke: {error}") from None

    def _receive(self, timeout_s: float) -> Any:
        assert self.process.stdout and self.process.stderr
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer for {timeout_s:g} s")
        try:
            return wire.receive(fd)
        except EOFError:
            said = self.process.stderr.read(1000).decode(errors="replace")
            raise EOFError(" ".join(said.split()[-40:]) or "it ended") from None

    def close(self) -> None:
        """End the process, and what it started."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # ends the candidate too
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()


class Sandbox:
    """The workers of this process, started when they are needed."""

    def __init__(self, namespaces: bool = True) -> None:
        """`namespaces`: use them where the system allows them."""
        self._namespaces = namespaces
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._registered = False

    def run_tests(
        self, code: str, tests: Sequence[str], setup: str = "", timeout_s: float = 3.0
    ) -> list[bool]:
        """Run code in a process of its own, then each test against it.

        Args:
            code: a Python program, of any text.
            tests: Python statements, such as `assert f(2) == 5`. Unlike the code they are trusted.
            setup: statements that run before the tests; trusted.
            timeout_s: seconds, wall time and CPU time, for all of this together.

        Returns:
            One verdict per test. False for all that ends badly, or comes too late, or breaks the
            process that compares: `sum(f())` of an endless range cannot be interrupted.

        Raises:
            SandboxError: no process can be started, or one breaks without a fault of this code.
        """
        if len(code) > MAX_CODE_CHARS:
            return [False] * len(tests)
        job = {"code": code, "tests": list(tests), "setup": setup, "timeout_s": timeout_s}
        for _ in range(TRIES):
            with suppress(BrokenWorkerError):
                return self._run(job)
        self._run(HARMLESS)  # raises where the system is at fault, and not the code
        return [False] * len(tests)

    def describe(self) -> str:
        """Whether namespaces hold the code, in one line."""
        worker = self._take()
        with self._lock:
            self._idle.append(worker)
        missing = [what for name, what in MISSING.items() if name not in worker.held]
        if not missing:
            return "no network, other files read-only, no other processes (namespaces)"
        return f"WITHOUT namespaces, which this system refuses: code {', '.join(missing)}"

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()

    def _run(self, job: dict[str, Any]) -> list[bool]:
        """Run a job in a worker, which stays for others unless it breaks."""
        worker = self._take()
        verdicts = worker.run(job)
        with self._lock:
            self._idle.append(worker)
        return verdicts

    def _take(self) -> Worker:
        with self._lock:
            if not self._registered:
                atexit.register(self.close)
                self._registered = True
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.close()  # the system has killed it meanwhile: no fault of the next job
        return Worker(self._namespaces)

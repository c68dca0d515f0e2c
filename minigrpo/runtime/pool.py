"""A thread pool that survives jobs that never return.

`concurrent.futures` joins its threads when the process exits, so one reward function that hangs
would keep the process alive forever. The threads here are daemons. A job that runs too long is
abandoned: its thread is left behind and replaced, up to `MAX_ABANDONED` threads. This does not help
against C code that loops while it holds the interpreter lock; no thread can interrupt that.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from .loss_arguments import whole
from .text import one_line

MAX_ABANDONED = 32  # hanging threads; beyond this number they are not replaced


class Job:
    """One call, its result, and when it started."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.future: Future[Any] = Future()
        self.started: float | None = None  # time.monotonic(); None while it waits in the queue
        self.abandoned = False

    def run(self) -> None:
        """Call the function and store its result, or what it raised, in `future`."""
        self.started = time.monotonic()
        try:
            self.future.set_result(self.function(*self.args))
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            if threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
            # a job that calls sys.exit() has failed; it must not take its thread with it
            self.future.set_exception(RuntimeError(one_line(error)))


class WorkerPool:
    """Runs jobs in `workers` daemon threads, first come, first served.

    With `workers=0`, `submit` runs a job in the calling thread, unless the job needs a thread.
    """

    def __init__(self, workers: int, name: str) -> None:
        """Raises ValueError for `workers` below 0, or no whole number."""
        whole("workers", workers, least=0)
        self.workers, self.name = workers, name
        self.queue: SimpleQueue[Job | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.alive = 0  # threads that take jobs from the queue
        self.num_abandoned = 0  # threads that are still inside an abandoned job

    def submit(self, function: Callable[..., Any], *args: Any, needs_thread: bool = False) -> Job:
        """Queue a call. It never raises: if no thread is left, the job fails with TimeoutError.

        Args:
            needs_thread: the call might hang, so it never runs in the calling thread, even if
                `workers` is 0.
        """
        job = Job(function, args)
        if not needs_thread and (not self.workers or not self._start_threads()):
            job.run()
        elif self._start_threads():
            self.queue.put(job)
        else:
            job.future.set_exception(self._all_hang())
        return job

    def wait(self, job: Job, timeout_s: float | None) -> Any:
        """Return the job's result, or raise what it raised.

        Wait for jobs in the order of submission: a job that is still in the queue has no deadline,
        because the time limit counts from the start of the call.

        Args:
            timeout_s: seconds that the call may run; None: no limit.

        Raises:
            TimeoutError: the call ran longer than `timeout_s`, or no thread is left to run it.
        """
        while not job.future.done():
            if job.abandoned:
                raise TimeoutError("was abandoned")
            if timeout_s is not None and not self.alive:
                raise self._all_hang()
            left = None
            if timeout_s is not None:
                left = timeout_s
                if job.started is not None:
                    left = job.started + timeout_s - time.monotonic()
                if left <= 0:
                    self._abandon(job)
                    raise TimeoutError(f"took longer than {timeout_s:g} s")
            elif not self._start_threads():
                # all threads hang, so the queue is stuck; this job cannot hang, so run it here
                return job.function(*job.args)
            try:
                job.future.exception(min(threading.TIMEOUT_MAX, 1.0 if left is None else left))
            except TimeoutError:
                continue
        return job.future.result()

    def close(self) -> None:
        """Stop idle threads. Busy ones are daemons and end with the process."""
        for _ in range(self.alive):
            self.queue.put(None)
        self.alive = 0

    def _start_threads(self) -> bool:
        """Start missing threads, within MAX_ABANDONED; return whether any thread takes jobs."""
        with self.lock:
            while self.alive < max(1, self.workers) and self.num_abandoned < MAX_ABANDONED:
                # a new thread starts on CUDA device 0, which may not be this process's device
                device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
                thread = threading.Thread(
                    target=self._work, args=(device,), name=self.name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the system allows no more threads: use those there are
                    break
                self.alive += 1
            return self.alive > 0

    def _work(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        while (job := self.queue.get()) is not None:
            job.run()
            with self.lock:
                if job.abandoned:  # returned too late: another thread has replaced this one
                    self.num_abandoned -= 1
                    return

    def _abandon(self, job: Job) -> None:
        with self.lock:
            job.abandoned = True
            self.alive -= 1
            self.num_abandoned += 1
        self._start_threads()

    def _all_hang(self) -> TimeoutError:
        return TimeoutError(f"all threads hang, {self.num_abandoned} of them")

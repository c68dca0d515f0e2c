"""A pool of threads that may be given up.

concurrent.futures joins its threads when the process exits, so one function that never returns
would keep the process for ever. These are daemons; one that is overdue is abandoned and replaced,
up to a bound. A function that holds the interpreter lock (C code that loops) cannot be helped by
any thread.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

MAX_ABANDONED = 32  # threads that hang somewhere; after that their places stay empty


class Job:
    """A call that is waited for."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.future: Future[Any] = Future()
        self.started: float | None = None
        self.abandoned = False

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self.future.set_result(self.function(*self.args))
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            if threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
            self.future.set_exception(
                RuntimeError(repr(error))
            )  # a reward that calls sys.exit() has failed, no more


class WorkerPool:
    """Runs jobs in `workers` daemon threads in the order in which they came; with 0, in the caller,
    unless they need one.
    """

    def __init__(self, workers: int, name: str) -> None:
        self.workers, self.name = workers, name
        self.queue: SimpleQueue[Job | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.alive = 0  # threads that take jobs
        self.num_abandoned = 0  # threads that are still in a job that was given up

    def submit(self, function: Callable[..., Any], *args: Any, needs_thread: bool = False) -> Job:
        """`needs_thread` jobs, which might hang, get a thread even in a pool of none."""
        job = Job(function, args)
        if not needs_thread and (not self.workers or not self._staffed()):
            job.run()
        elif self._staffed():
            self.queue.put(job)
        else:
            job.future.set_exception(
                TimeoutError(f"all threads hang, {self.num_abandoned} of them")
            )
        return job

    def wait(self, job: Job, timeout_s: float | None) -> Any:
        """The job's result, or what it raised; TimeoutError once it has run for `timeout_s`. To be
        called in order.
        """
        while not job.future.done():
            if job.abandoned or (timeout_s is not None and not self.alive):
                raise TimeoutError(
                    "was given up"
                    if job.abandoned
                    else f"all threads hang, {self.num_abandoned} of them"
                )
            left = (
                timeout_s
                if timeout_s is None or job.started is None
                else job.started + timeout_s - time.monotonic()
            )
            if left is not None and left <= 0:
                self._abandon(job)
                raise TimeoutError(f"took longer than {timeout_s:g} s")
            if timeout_s is None and not self._staffed():
                return job.function(*job.args)  # what cannot hang need not wait for those that do
            try:
                job.future.exception(min(threading.TIMEOUT_MAX, 1.0 if left is None else left))
            except TimeoutError:
                continue
        return job.future.result()

    def close(self) -> None:
        """Let idle threads go; those that are busy end with the process."""
        for _ in range(self.alive):
            self.queue.put(None)
        self.alive = 0

    def _staffed(self) -> bool:
        """Start threads that are missing, as far as the bound allows; whether there are any."""
        with self.lock:
            while self.alive < max(1, self.workers) and self.num_abandoned < MAX_ABANDONED:
                self.alive += 1
                # a new thread would begin on the first CUDA device, not on its process's own
                device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
                threading.Thread(
                    target=self._work, args=(device,), name=self.name, daemon=True
                ).start()
            return self.alive > 0

    def _work(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        while (job := self.queue.get()) is not None:
            job.run()
            with self.lock:
                if job.abandoned:  # it came back after all, and its place has been taken
                    self.num_abandoned -= 1
                    return

    def _abandon(self, job: Job) -> None:
        with self.lock:
            job.abandoned = True
            self.alive -= 1
            self.num_abandoned += 1
        self._staffed()

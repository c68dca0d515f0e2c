"""Worker processes that call code of others. A late call ends with its process alone."""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import RunFailed, error_text
from ..userfiles import files_read, sha256_of
from .hangs import LONGEST_S

LATE = "it took longer than its timeout_s"
# The signals that ask a run to stop: Ctrl-C, a scheduler that ends the job, schedulers that warn
# before they do, and a terminal that closes.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


class WorkerProcesses:
    """Processes that call a function of a module or a user's file."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.idle = SimpleQueue[tuple[subprocess.Popen[bytes], Connection]]()

    def call(self, arguments: Sequence[Any], timeout_s: float) -> Any:
        """The function's answer. Raises TimeoutError, and RuntimeError for what it raises."""
        try:
            process, pipe = self.idle.get_nowait()
        except Empty:
            process, pipe = self._start()
        try:
            pipe.send(arguments)
            if not pipe.poll(min(timeout_s, LONGEST_S)):
                raise TimeoutError(LATE)
            result, error_said = pipe.recv()  # EOFError: it has ended
            answer = pickle.loads(result)
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.idle.put((process, pipe))
        if error_said:
            raise RuntimeError(error_said)
        return answer

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        """A process that has imported the function, and the connection to it."""
        # multiprocessing would run a script of the user's again
        pipe, theirs = Pipe()
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        # a signal to the process group of the run is for the run alone
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        pipe.send((sys.path, self.module, self.name))
        first_read = files_read()
        try:
            read_anew = pipe.recv()  # it is ready
        except EOFError:  # it has ended, perhaps because a file is no longer whole
            read_anew = {file: sha256_of(file) for file in first_read}
        changed = [file for file, sha in read_anew.items() if first_read.get(file, sha) != sha]
        if changed:  # with the error, the connection and then the process end
            advice = "has changed since the run began: restore it, or resume with it as it is"
            raise RunFailed(f"{', '.join(changed)} {advice}")
        return process, pipe


def serve(file: int) -> None:
    """The program of a worker process, which ends when its connection does."""
    # 1. Import the function. A signal that asks the run to stop is for what it forks alone.
    handle_stop_signals(lambda number, frame: None)
    os.register_at_fork(after_in_child=partial(handle_stop_signals, signal.SIG_DFL))
    pipe = Connection(file)
    sys.path[:], module, name = pipe.recv()
    function = attrgetter(name)(import_module(module))
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    pipe.send(files_read())

    # 2. Call it.
    with suppress(EOFError, OSError):  # the run has ended
        while True:
            arguments = pipe.recv()
            # if the run ends meanwhile, SIGIO ends this process, whoever holds Python's lock
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_ASYNC)
            error_said = ""
            try:
                result = pickle.dumps(function(*arguments))
            except BaseException as error:  # perhaps the answer cannot be pickled
                result = pickle.dumps(None)
                error_said = error_text(error)
            fcntl.fcntl(file, fcntl.F_SETFL, 0)
            pipe.send((result, error_said))


def handle_stop_signals(action: Any) -> None:
    for name in STOP_SIGNALS:
        signal.signal(signal.Signals[name], action)

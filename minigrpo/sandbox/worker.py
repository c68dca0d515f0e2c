"""A worker of the sandbox: forks a process per program, and ends it.

It is started by its path, so it imports nothing but the standard library. It never reads a program
or a test: the trainer gets a connection to each forked process. What a program sends there is a
value that it could have returned, so nothing in its process has to be safe from it.
"""

import builtins
import json
import math
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Set
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

globals()["__builtins__"] = vars(builtins).copy()  # a program may replace those of the module

LARGEST = 2 << 20  # bytes of a message
CONTAINERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (list, tuple, dict, frozenset)}
LIMITS = {"AS": 512 << 20, "FSIZE": 0, "NOFILE": 64, "CORE": 0}
READS = os.O_RDONLY | os.O_CLOEXEC  # as `open` does
# whose audit events are refused: processes and signals, C code, the network, files apart from
# opening and listing them, and the objects of this process
REFUSED = "ctypes fcntl gc os pty resource signal socket sqlite3 subprocess"
# what solutions import, read once for all of them
WARM = (
    "array bisect calendar cmath collections copy datetime decimal fractions functools heapq"
    " itertools operator re statistics string textwrap typing"
)


def encode(value: Any) -> object:
    """A plain value as JSON, of a subclass (a Counter) as its base; a TypeError for any other."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Set):  # and the views of a dict
        value = frozenset(value)
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            contents = value.items() if kind is dict else value
            return {name: [encode(part) for part in contents]}
    raise TypeError("not a plain value")


def decode(form: dict[str, object]) -> object:
    """The container that `encode` made an object of, whose contents are decoded already."""
    [(name, contents)] = form.items()
    return CONTAINERS[name](contents)


def frame(message: object) -> bytes:
    """A message as it is sent: a line of JSON."""
    return json.dumps(encode(message)).encode() + b"\n"


def receive(stream: BufferedIOBase) -> Any:
    """Read a message. Raises an error of some kind if none comes, or a wrong one."""
    return json.loads(stream.readline(LARGEST), object_hook=decode)


def serve(stream: BufferedIOBase) -> NoReturn:
    """Run or evaluate one piece of Python after another, until this process is killed.

    A program that looks at the frames of its callers finds no earlier answer there, and not the key
    that shows that an answer is one: it is read after the work.
    """
    seconds = math.ceil(receive(stream))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    # dataclasses with annotations as texts look for the module of their class
    sys.modules["program"] = ModuleType("program")
    namespace = vars(sys.modules["program"])
    namespace["__builtins__"] = builtins
    random.seed(0)  # a run can be repeated
    refuse_harm()
    while True:
        kind, source = receive(stream)
        answer = frame([])
        with suppress(BaseException):
            answer = frame([eval(compile(source, "<program>", kind), namespace)])
        stream.write(frame(receive(stream)) + answer)
        stream.flush()


def refuse_harm() -> None:
    """Refuse from now on, with an error, what would reach outside this process."""
    for place in (os, sys.modules["posix"]):
        del place.mkfifo, place.mknod  # which raise no event
    library = tuple(path + "/" for path in sys.path)
    refused = set(REFUSED.split())

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir"):  # imports read the library
            path = os.path.abspath(os.fsdecode(args[0])) + "/"
            harmless = path.startswith(library) and (event != "open" or args[2] == READS)
        elif event == "import":
            harmless = args[0] != "_posixsubprocess"  # starts processes without an event
        else:
            harmless = event.partition(".")[0] not in refused
        if not harmless:
            raise PermissionError("a program may not do this")

    sys.addaudithook(hook)


def main(control: socket.socket) -> None:
    """Serve until the trainer has closed the connection; fork while it is busy with answers."""
    # what asks a run to stop leaves verdicts as they are: the run finishes its step first
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)  # in programs, too
    Path("/proc/self/oom_score_adj").write_text("1000")  # not the trainer if memory runs out
    for name in WARM.split():
        __import__(name)
    for name, most in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    os.environ.clear()
    done = b"e"
    while done:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                os.dup2(1, 0)  # in place of the worker's connection
                os.dup2(1, 2)
                theirs.close()
                serve(ours.makefile("rwb"))
            finally:
                os._exit(0)  # neither atexit nor finalizers of the program
        ours.close()
        done = b""
        with suppress(OSError), theirs:  # the trainer may have ended
            socket.send_fds(control, [b"c"], [theirs.fileno()])
            done = control.recv(1)  # the trainer has its answers
        os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has no group yet
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(socket.socket(fileno=0))

"""A worker of the sandbox: forks a process per program, and ends it.

The trainer starts this file by its path, so it imports nothing but the standard library. The worker
never reads a program or a test: the trainer gets a connection to each forked process, which is gone
with the program. Whatever a program sends there is a value that it could have returned, so nothing
in its process has to be safe from it.
"""

import builtins
import gc
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

MIB = 2**20
LARGEST = 2 * MIB  # bytes of a message
LIMITS = {"AS": 512 * MIB, "FSIZE": 0, "NOFILE": 64, "CORE": 0}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# whose audit events are refused: processes and signals, C code, the network, files apart from
# opening and listing them, and the objects of this process
REFUSED = "ctypes fcntl gc os pty resource signal socket sqlite3 subprocess"
# what solutions import, read once for all of them
WARM = "array bisect calendar cmath collections copy datetime decimal fractions functools heapq"
WARM += " itertools operator re statistics string textwrap typing"


# --- messages -----------------------------------------------------------------------------------

# name -> the type of a value, and of its copy
CONTAINERS: dict[str, tuple[Any, Any]] = {
    "dict": (dict, dict),
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (Set, frozenset),
}


def encode(value: Any) -> Any:
    """A plain value as JSON; one of a subclass (a Counter, a named tuple) as its base.

    Raises TypeError for what is not plain.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, (kind, _) in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(x) for x in (value.items() if kind is dict else value)]]
    raise TypeError("not a plain value")


def decode(form: Any) -> Any:
    """The value that `encode` made JSON of."""
    if not isinstance(form, list):
        return form
    name, contents = form
    return CONTAINERS[name][1](map(decode, contents))


def frame(message: Any) -> bytes:
    """A message as it is sent: a line of JSON."""
    return json.dumps(encode(message)).encode() + b"\n"


def receive(stream: BufferedIOBase) -> Any:
    """Read a message. Raises an error of some kind if none comes, or a wrong one."""
    return decode(json.loads(stream.readline(LARGEST)))


# --- the process of a program -------------------------------------------------------------------


def serve(stream: BufferedIOBase) -> NoReturn:
    """Run or evaluate one piece of Python after another, until this process is killed.

    The key that shows that an answer is one is read after the work: a program that looks at the
    frames of its callers does not find it.
    """
    limit("CPU", math.ceil(receive(stream)))
    # dataclasses with annotations as texts look for the module of their class
    module = sys.modules["program"] = ModuleType("program")
    namespace = vars(module)
    namespace["__builtins__"] = builtins
    random.seed(0)  # a run can be repeated
    refuse_harm()
    while True:
        kind, source = receive(stream)
        answer = frame([])
        with suppress(BaseException):
            value = eval(compile(source, "<program>", kind), namespace)
            answer = frame([True if kind == "exec" else value])
        stream.write(frame(receive(stream)) + answer)
        stream.flush()


def refuse_harm() -> None:
    """Refuse from now on, with an error, what would reach outside this process."""
    for place in (os, sys.modules["posix"]):
        del place.mkfifo, place.mknod  # which raise no event
    library, refused = tuple(path + "/" for path in sys.path), set(REFUSED.split())

    def hook(event: str, args: tuple[Any, ...]) -> None:
        harmless = event.partition(".")[0] not in refused
        if event in ("open", "os.listdir", "os.scandir"):  # imports read the library
            harmless = (os.path.abspath(os.fsdecode(args[0])) + "/").startswith(library)
            harmless = harmless and not (event == "open" and args[2] & WRITES)
        elif event == "import":
            harmless = args[0] != "_posixsubprocess"  # starts processes without an event
        if not harmless:
            raise PermissionError("a program may not do this")

    sys.addaudithook(hook)


# --- the worker ---------------------------------------------------------------------------------


def main(control: socket.socket) -> None:
    """Serve until the trainer ends or closes the connection.

    The next process is forked while the trainer is busy with the last answers.
    """
    Path("/proc/self/oom_score_adj").write_text("1000")  # not the trainer if memory runs out
    for name in WARM.split():
        __import__(name)
    for name, most in LIMITS.items():
        limit(name, most)
    os.environ.clear()
    gc.freeze()  # collections in the programs then copy no memory
    done = b"e"
    while done:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                os.dup2(1, 2)
                control.close()
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


def limit(name: str, most: int) -> None:
    """Limit this process and those that it forks; the limit cannot be raised again."""
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

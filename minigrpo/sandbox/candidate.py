"""The process that runs a model's code. It answers the judge, and knows nothing of the tests.

Nothing here has to be safe from the candidate, which can change all of it: whatever it sends is a
value that it could have returned.
"""

import builtins
import marshal
import operator
import os
import signal
import sys
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from . import wire
from .audit import refuse_harm
from .isolation import end_with_parent, forget_libc, limit_resources

MOST_DESCRIPTORS = 64  # that a worker has open
# what the judge may ask of an object that stays here; judge.Remote has a method for each
OPERATIONS: dict[str, Any] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "bool": bool,
    "len": len,
    "iter": iter,
    "str": str,
    "repr": repr,
}


def run(requests: int, replies: int, folder: str) -> NoReturn:
    """Wait for code on a pipe, run it, answer requests until the pipe is closed; then exit."""
    try:
        _confine(folder, requests, replies)
        job = wire.receive(3)
        limit_resources(job["cpu_s"])
        forget_libc()
        refuse_harm(folder)
        _answer(3, 4, _load(job["code"], job["setup"]), job["names"])
    finally:
        os._exit(0)  # neither atexit nor finalizers of the candidate


def _confine(folder: str, requests: int, replies: int) -> None:
    """Keep two pipes, as 3 and 4, and nothing else of the worker."""
    os.setsid()
    end_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    # above all targets first, so that none is overwritten before it is copied
    keep = [os.dup2(fd, 50 + i) for i, fd in enumerate((nothing,) * 3 + (requests, replies))]
    for target, fd in enumerate(keep):
        os.dup2(fd, target)
    os.closerange(len(keep), MOST_DESCRIPTORS)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)


def _load(code: str, setup: str) -> dict[str, Any]:
    """Run the code, then the setup of its tests; return the global names.

    An error in the code ends the process. One in the setup does not: the judge sees it too.
    """
    # dataclasses with annotations as texts look for the module of their class
    module = sys.modules["candidate"] = ModuleType("candidate")
    namespace = vars(module)
    namespace["__builtins__"] = builtins
    exec(compile(code, "<candidate>", "exec"), namespace)
    with suppress(BaseException):
        exec(compile(setup, "<setup>", "exec"), namespace)
    return namespace


def _answer(requests: int, replies: int, namespace: dict[str, Any], names: list[str]) -> None:
    """Send the values of some names, then answer requests."""
    objects: list[Any] = []
    places: dict[int, int] = {}  # by id, which is that of one object as long as it is kept

    def refer(value: Any) -> Any:
        if (place := places.setdefault(id(value), len(objects))) == len(objects):
            objects.append(value)
        return {"object": place}

    def resolve(name: str, payload: Any) -> Any:
        if name == "object":
            return objects[payload]
        if name == "library":
            return wire.find(*payload)
        code, defaults = payload  # a function of the tests
        function = FunctionType(marshal.loads(bytes.fromhex(code)), namespace)
        function.__defaults__, function.__kwdefaults__ = wire.decode(defaults, resolve)
        return function

    known = {name: wire.encode(namespace[name], refer) for name in names if name in namespace}
    wire.send(replies, known)
    while True:
        operation, *arguments = wire.receive(requests)
        try:
            value = OPERATIONS[operation](*(wire.decode(x, resolve) for x in arguments))
            reply = {"value": wire.encode(value, refer)}
        except BaseException as error:
            kinds, arguments = [kind.__name__ for kind in type(error).__mro__], list[Any]()
            with suppress(BaseException):  # what a hostile value raises
                arguments = wire.encode(list(error.args), refer)
            reply = {"error": kinds, "arguments": arguments}
        wire.send(replies, reply)

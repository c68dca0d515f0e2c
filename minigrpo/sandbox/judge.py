"""Runs tests against a candidate in another process. Only plain values come from there.

A test may be any Python. Its names are the judge's own, except for those that only the candidate
defines: these are stand-ins (`Remote`), and what a test does with one is asked there. Arguments
cross as copies, so a test does not see a list that the candidate changes in place.
"""

import ast
import builtins
import importlib
import marshal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

from . import wire

# what a call raises ends an iteration of the test: all(map(test, ...)) would pass without a test
ENDS = StopIteration, StopAsyncIteration


class OutOfTime(BaseException):
    """The wall time of a candidate is over. Raised by a signal, wherever the judge is."""


class Channel:
    """The judge's end of the pipes to a candidate."""

    def __init__(self, requests: int, replies: int) -> None:
        """The descriptors of two pipes: to write to, and to read from."""
        self.requests, self.replies = requests, replies
        self.broken = False  # the candidate has ended, or sends what is no reply
        self.refused = False  # an argument could not cross, so that the candidate was not asked
        self.objects: dict[int, Remote] = {}  # so that one object is one stand-in

    def load(self, code: str, setup: str, names: set[str], cpu_s: int) -> dict[str, Any]:
        """Have the candidate run its code; return those of some names that it then defines."""
        job = {"code": code, "setup": setup, "names": sorted(names), "cpu_s": cpu_s}
        found = self._exchange(job)
        return {name: wire.decode(found[name], self._resolve) for name in names & found.keys()}

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Have the candidate do something; return the value. Raises what the candidate raised."""
        # before anything is sent: an argument that cannot cross breaks nothing
        try:
            request = [operation, *(wire.encode(x, _refer) for x in arguments)]
        except Exception:
            self.refused = True  # a test may expect an error: it would take this one for it
            raise
        reply = self._exchange(request)
        try:
            if "error" not in reply:
                return wire.decode(reply["value"], self._resolve)
            kinds = reply["error"]
            arguments = wire.decode(reply["arguments"], self._resolve)
            known = [getattr(builtins, name, None) for name in kinds]
        except Exception:
            self.broken = True
            raise
        for error in known:  # its own kind, or the builtin one that it is derived from
            if isinstance(error, type) and issubclass(error, Exception) and error not in ENDS:
                raise _made(error, arguments)
        raise RuntimeError(f"the candidate raised {kinds[0]}")

    def _exchange(self, message: Any) -> Any:
        if self.broken:
            raise EOFError
        try:
            wire.send(self.requests, message)
            return wire.receive(self.replies)
        except Exception:
            self.broken = True
            raise

    def _resolve(self, name: str, payload: Any) -> "Remote":
        if name != "object" or type(payload) is not int:
            raise ValueError("not a value")
        return self.objects.setdefault(payload, Remote(self, payload))


class Remote:
    """An object that stays in the candidate's process. It equals nothing but itself."""

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._channel.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask("getitem", self, key)

    def __contains__(self, value: Any) -> bool:
        return bool(self._channel.ask("contains", self, value))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._channel.ask("iter", self))

    def __len__(self) -> int:
        return int(self._channel.ask("len", self))

    def __bool__(self) -> bool:
        return bool(self._channel.ask("bool", self))

    def __str__(self) -> str:
        return str(self._channel.ask("str", self))

    def __repr__(self) -> str:
        return str(self._channel.ask("repr", self))


def _made(kind: type[Exception], arguments: Sequence[Any]) -> Exception:
    """An exception of a builtin kind; not by a call, which some refuse without more arguments."""
    error = kind.__new__(kind, *arguments)
    error.args = tuple(arguments)
    return error


def _refer(value: Any) -> Any:
    """How what is not plain crosses to the candidate. Raises TypeError if it cannot."""
    if type(value) is Remote:
        return {"object": object.__getattribute__(value, "_number")}
    path = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", "")
    if path[0] in sys.stdlib_module_names and wire.find(*path) is value:  # len, str.upper, math.gcd
        return {"library": path}
    if type(value) is FunctionType and not value.__code__.co_freevars:
        defaults = wire.encode([value.__defaults__, value.__kwdefaults__], _refer)
        return {"function": [marshal.dumps(value.__code__).hex(), defaults]}
    raise TypeError(f"a test may not pass a {type(value).__name__} to the candidate")


class Tests(NamedTuple):
    """Tests that have been parsed."""

    setup: ast.Module
    tests: Sequence[ast.Module | None]  # None: is no Python

    @staticmethod
    def parse(setup: str, tests: Iterable[str]) -> "Tests":
        """Raises SyntaxError for the setup."""
        parsed = list[ast.Module | None]()
        for test in tests:
            parsed.append(None)
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                parsed[-1] = ast.parse(test)
        return Tests(ast.parse(setup), parsed)

    def nodes(self) -> Iterator[ast.AST]:
        for tree in (self.setup, *filter(None, self.tests)):
            yield from ast.walk(tree)

    def names(self) -> set[str]:
        """What the tests may take from the candidate: names that are no modules."""
        used = {node.id for node in self.nodes() if isinstance(node, ast.Name)}
        return used - self.modules()

    def modules(self) -> set[str]:
        """Modules of the standard library that the tests use without an import."""
        bases = (node.value for node in self.nodes() if isinstance(node, ast.Attribute))
        return {base.id for base in bases if isinstance(base, ast.Name)} & sys.stdlib_module_names


def run_tests(
    channel: Channel, code: str, tests: Sequence[str], setup: str, cpu_s: int
) -> Iterator[bool]:
    """Yield the verdict of each test; fewer than there are tests if the candidate fails.

    Args:
        setup: statements that run before the tests.
        cpu_s: seconds of CPU time that the candidate may take.
    """
    trees = Tests.parse(setup, tests)
    try:
        defined = channel.load(code, setup, trees.names(), cpu_s)
    except Exception:  # whatever the candidate sent
        return
    # A builtin is the judge's own, or `set(f(1)) == {2}` would pass with a patched `set`; unless
    # the tests take nothing else from the candidate, because the solution is named `sum`.
    taken = {name: x for name, x in defined.items() if not hasattr(builtins, name)} or defined
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins, **taken}
    for name in trees.modules():
        with suppress(ImportError):
            namespace[name] = importlib.import_module(name)
    # objects of a class go to the candidate, which has run the setup too: the class is its own
    own = [node for node in trees.setup.body if not isinstance(node, ast.ClassDef)]
    if not _passes(ast.Module(own, []), namespace):
        return
    for tree in trees.tests:
        channel.refused = False
        passed = not channel.broken and tree is not None and _passes(tree, namespace)
        yield passed and not (channel.broken or channel.refused)


def _passes(tree: ast.Module, namespace: dict[str, Any]) -> bool:
    """Whether statements run to their end. Only OutOfTime is raised."""
    with suppress(Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
        exec(compile(tree, "<test>", "exec"), namespace)
        return True
    return False

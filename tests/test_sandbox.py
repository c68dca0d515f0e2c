"""Code that a model wrote: what it may do, what it cannot, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minigrpo.sandbox import wire
from minigrpo.sandbox.workers import (
    HARMLESS,
    PACKAGE,
    START,
    BrokenWorkerError,
    Sandbox,
    SandboxError,
    Worker,
)
from minigrpo.tasks.code import run_tests

from . import hostile_code
from .hostile_code import TESTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code runs on Linux only")
WITHOUT_TORCH = START.partition("from minigrpo")[
    0
]  # imports nothing of the package but the sandbox
RIGHT = "def f(x): return x + 1"


UNAUDITED = START.replace(
    "server.main", "server.candidate.refuse_harm = lambda folder: None\nserver.main"
)
SLOW_MACHINE_S = 60.0  # other tests may use the cores
WAYS = {
    "both": (True, START),
    "hooks": (False, START),  # as where the system allows no namespaces
    "namespaces": (True, UNAUDITED),
}


@pytest.fixture(
    scope="module",
    params=["both", *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[1:])],
)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """What holds the code: either of two layers would do alone. One worker survives all of it."""
    namespaces, start = WAYS[request.param]
    made = Sandbox(namespaces)
    with pytest.MonkeyPatch.context() as patch:
        with patch.context() as only_here:
            only_here.setattr("minigrpo.sandbox.workers.START", start)
            said = made.describe()
        patch.setattr("minigrpo.sandbox.workers.GRACE_S", SLOW_MACHINE_S)
        if request.param == "namespaces" and "WITHOUT" in said:
            pytest.skip("this system allows no namespaces")
        yield made
    assert made.run_tests(RIGHT, TESTS) == [True] * len(TESTS)
    made.close()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "kept").write_text("as it was")
    return tmp_path


def parents() -> dict[int, int]:
    """Every process of the system, and its parent."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    tree = parents()
    found = [pid]
    for one in found:
        found += [child for child, parent in tree.items() if parent == one]
    return found[1:]


def check_hostile(sandbox: Sandbox, code: str, outside: Path, timeout_s: float) -> None:
    before = {path: path.stat() for path in (outside, outside / "kept")}
    code = code.replace("OUTSIDE", str(outside))
    start = time.monotonic()
    (first,) = sandbox._idle
    assert sandbox.run_tests(code, TESTS, timeout_s=timeout_s) == [False] * len(TESTS)
    assert time.monotonic() - start < timeout_s + SLOW_MACHINE_S
    # the same worker is ready for the next one: a server, the next candidate and the next judge
    (worker,) = sandbox._idle
    assert worker is first
    assert len(descendants(worker.process.pid)) <= 3
    assert {path: path.stat() for path in before} == before
    assert [path.name for path in outside.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", hostile_code.SHORT)
def test_hostile_code_fails_and_leaves_nothing(sandbox: Sandbox, name: str, outside: Path) -> None:
    check_hostile(sandbox, hostile_code.SHORT[name], outside, timeout_s=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_code.LONG)
def test_hostile_code_that_takes_long_fails_in_time(
    sandbox: Sandbox, name: str, outside: Path
) -> None:
    check_hostile(sandbox, hostile_code.LONG[name], outside, timeout_s=0.3)


def test_code_that_never_ends_keeps_the_verdicts_that_it_has(sandbox: Sandbox) -> None:
    code = "def f(x):\n    while x > 1: pass\n    return x + 1"
    start = time.monotonic()
    verdicts = sandbox.run_tests(code, ["assert f(1) == 2", "assert f(2) == 3"], timeout_s=0.2)
    assert verdicts == [True, False]
    assert time.monotonic() - start < 2


PASSING = {
    "values": (
        "def f(x): return x",
        """
from collections import Counter, deque
from fractions import Fraction
from math import inf
values = [None, True, 1, 10**5000, 1.5, inf, 1j, 'a\\ud800', b'b', bytearray(b'c'), (1, [2]),
    {1: (2,)}, {3}, frozenset([4]), deque([5]), range(6), Fraction(1, 3)]
""",
        ["for x in values: assert f(x) == x and type(f(x)) is type(x)"],
    ),
    "dates": (
        "from datetime import *\ndef f(x): return x + timedelta(1, 2, 3)",
        "from datetime import *",
        [
            f"assert f({x}) == {x} + timedelta(1, 2, 3)"
            for x in ("date(2020, 2, 28)", "datetime(2020, 1, 1, tzinfo=timezone.utc)")
        ],
    ),
    "views of dicts, and arrays": (
        "from array import array\nd = {1: 2, 3: 4}\ndef f(): return d.keys(), d.values(), d.items()"
        "\ndef g(): return array('i', [1, 2])",
        "from array import array",
        [
            "assert f()[0] == {1, 3} and list(f()[1]) == [2, 4]",
            "assert f()[2] == {(1, 2), (3, 4)} and dict(f()[2]) == {1: 2, 3: 4}",
            "assert g() == array('i', [1, 2]) and g()[1] == 2",
        ],
    ),
    "subclasses": (
        "from collections import *\nf = Counter\ng = namedtuple('G', 'a b')",
        "",
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert g(1, 2) == (1, 2)"],
    ),
    "dicts with an order": (
        "from collections import OrderedDict\ndef f(x): return OrderedDict(x)",
        "from collections import OrderedDict",
        [
            "assert f([(1, 2), (3, 4)]) == OrderedDict([(1, 2), (3, 4)]) == {3: 4, 1: 2}",
            "assert f([(3, 4), (1, 2)]) != OrderedDict([(1, 2), (3, 4)])",
        ],
    ),
    "modules": (
        "def f(x): return x ** 0.5",
        "import math",
        ["assert math.isclose(f(2), 1.4142135, rel_tol=1e-6)", "assert f(4) == math.sqrt(4)"],
    ),
    "modules without an import": ("def f(x): return x / 3", "", ["assert math.isclose(f(1), 1/3)"]),
    "classes": (
        "class Node:\n    def __init__(self, x): self.x, self.left = x, None\n"
        "def f(node): return 1 + f(node.left) if node else 0",
        "root = Node(1)\nroot.left = Node(2)",
        ["assert (f(root)) == 2", "assert root.left.x == 2 and root.left.left is None"],
    ),
    "classes of the setup": (
        "def f(pairs): return max(p.b - p.a for p in pairs)",
        "class P:\n    def __init__(self, a, b): self.a, self.b = a, b",
        ["assert f([P(5, 24), P(15, 25)]) == 19"],
    ),
    "functions": (
        "def f(g, x): return g(x) + h(x)",
        "def h(x): return 10 * x",
        [
            "assert f(lambda x, y=1: x + y, 2) == 23",
            "assert f(h, 1) == 20",
            "assert f(abs, -1) == -9",
        ],
    ),
    "named like a builtin": ("def sum(a, b): return a * b", "", ["assert sum(3, 5) == 15"]),
    "errors": (
        "def f(x): raise ValueError",
        "",
        ["try: f(1)\nexcept ValueError: pass\nelse: assert False"],
    ),
    "iterators": (
        "def f(n): yield from range(n)",
        "",
        [
            "assert list(f(3)) == [0, 1, 2]",
            "assert next(f(1)) == 0",
            "assert list(f(10000)) == list(range(10000))",
            "from itertools import islice\nassert list(islice(f(10**9), 3)) == [0, 1, 2]",
        ],
    ),
    "files of its own": (
        "def f(x):\n    open('a', 'w').write(str(x))\n    return int(open('a').read())",
        "",
        ["assert f(7) == 7"],
    ),
    "standard library": (
        "import json, difflib, hashlib, decimal, unicodedata, string\ndef f(x): return 1",
        "",
        ["assert f(0) == 1"],
    ),
    "functions of the library as arguments": (
        "def f(g, x): return g(x)",
        "import math, operator",
        ["assert f(str.upper, 'a') == 'A'", "assert f(math.sqrt, 4) == 2 == -f(operator.neg, 2)"],
    ),
    "a time of day": (
        "import datetime\ndef f(): return datetime.time(1, 2)",
        "import datetime",
        ["assert f() == datetime.time(1, 2)"],
    ),
}


@pytest.mark.parametrize("name", PASSING)
def test_right_code_passes(sandbox: Sandbox, name: str) -> None:
    code, setup, tests = PASSING[name]
    assert sandbox.run_tests(code, tests, setup) == [True] * len(tests)


@pytest.mark.parametrize(
    "test",
    [
        "print(f(1), flush=True)",
        "import sys; sys.stdout.buffer.write(b'\\x06\\0\\0\\0[true]'); sys.stdout.flush()",
        "import sys; sys.stderr.write('x' * 200_000)",  # more than a pipe holds
        "import warnings; warnings.warn('x' * 200_000)",
        "import sys; assert not sys.stdin.read()",
        "import os; os.close(0); os.close(1); os.close(2)",
    ],
)
def test_what_a_test_reads_and_prints_is_no_verdict(sandbox: Sandbox, test: str) -> None:
    assert sandbox.run_tests(RIGHT, [test, "assert f(1) == 3"]) == [True, False]
    assert sandbox.run_tests(RIGHT, ["assert f(1) == 2"], setup=test) == [True]


@pytest.mark.parametrize("caught", ["except:", "except BaseException:"])
def test_a_test_that_catches_every_error_does_not_pass_when_its_time_is_over(caught: str) -> None:
    tests = [f"try:\n  f(1)\n{caught}\n  pass"]
    assert run_tests("def f(x):\n  while True: pass", tests, timeout_s=0.3) == [False]
    assert run_tests("def f(x): raise ValueError", tests) == [True]


def test_a_patched_builtin_is_not_the_one_of_the_tests(sandbox: Sandbox) -> None:
    code = "def set(x): return {1, 2}\nlen = sorted = set\ndef f(x): return [7]"
    tests = ["assert set(f(1)) == {1, 2}", "assert len(f(1)) == {1, 2}", "assert f(1) == [7]"]
    assert sandbox.run_tests(code, tests) == [False, False, True]


def test_one_run_sees_nothing_of_another(sandbox: Sandbox) -> None:
    assert sandbox.run_tests("import math\nmath.x = 1\nopen('a', 'w')", []) == []
    code = "import math, os\ndef f(): return hasattr(math, 'x') or os.listdir()"
    assert sandbox.run_tests(code, ["assert f() == []"]) == [True]


def test_code_finds_no_test_in_memory() -> None:
    made = Sandbox()
    # a function of a test is in a cycle with the names of the test, so it is not freed at once
    tests = ["def right(x): return x == 'answer 4711'\nassert right(f())"]
    made.run_tests("def f(): return 'answer'", tests)
    for name, code in hostile_code.LOOKS_BACK.items():
        assert made.run_tests(code, tests) == [False], name
    assert len(made._idle) == 1  # all with the same worker
    made.close()


def test_code_changes_nothing_that_later_code_inherits() -> None:
    made = Sandbox()
    made.run_tests("import os\nos.sched_setaffinity(os.getppid(), [0])", [])
    made.run_tests(
        "import os\nos.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))", []
    )
    code = "import os\ndef f(): return os.sched_getscheduler(0), os.sched_getaffinity(0)"
    expected = os.sched_getscheduler(0), os.sched_getaffinity(0)
    assert made.run_tests(code, [f"assert f() == {expected}"]) == [True]
    made.close()


def test_a_call_that_raises_stop_iteration_ends_no_loop_of_a_test() -> None:
    tests = ["assert all(map(lambda x: f(x) == 7, [1, 2]))", "assert not list(map(f, [1]))"]
    assert run_tests("def f(x): raise StopIteration", tests) == [False, False]


def test_a_test_that_is_not_python_fails_alone() -> None:
    assert run_tests(RIGHT, ["assert f(", "assert f(1) == 2"]) == [False, True]


def test_a_worker_that_is_killed_is_replaced_and_the_job_is_done() -> None:
    sandbox = Sandbox()
    assert sandbox.run_tests(RIGHT, TESTS[:2]) == [True, True]
    (worker,) = sandbox._idle
    os.kill(worker.process.pid, 9)
    assert sandbox.run_tests(RIGHT, TESTS[:2]) == [True, True]
    assert sandbox._idle != [worker]
    sandbox.close()


def test_workers_that_the_system_has_killed_are_no_fault_of_a_job() -> None:
    """Two tries met two dead workers, a third one was well: so right code was said to fail."""
    sandbox = Sandbox()
    workers = [sandbox._take() for _ in range(3)]
    sandbox._idle = workers
    for worker in workers:
        os.kill(worker.process.pid, 9)
        worker.process.wait()
    assert sandbox.run_tests(RIGHT, TESTS[:2]) == [True, True]
    sandbox.close()


def test_code_that_breaks_every_worker_fails_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Worker.run

    def broken(worker: Worker, job: dict[str, Any]) -> list[bool]:
        if job["code"] != "breaks":
            return run(worker, job)
        worker.close()
        raise BrokenWorkerError("the process that runs code broke")

    monkeypatch.setattr(Worker, "run", broken)
    sandbox = Sandbox()
    assert sandbox.run_tests("breaks", ["pass", "pass"]) == [False, False]
    assert sandbox.run_tests("x = 1", ["assert x == 1"]) == [True]
    sandbox.close()


def test_answers_that_a_test_cannot_go_through_fail_alone() -> None:
    code = "def f(n):\n    return range(10**12)\ndef g(n):\n    return 10**10"
    # both would take the worker's memory or time, and with it the run's
    tests = ["assert 'a' * g(1) == 'a'", "assert g(1) == 10**10", "assert max(f(1)) == 3"]
    assert run_tests(code, tests) == [False, True, False]
    # an iterator that is too long to cross is no shorter one
    code = "def f(n):\n    yield from range(n)"
    tests = ["assert list(f(10001)) == list(range(10000))", "assert sum(f(10**6)) == 49995000"]
    assert run_tests(code, [*tests, "assert max(f(10000)) == 9999"]) == [False, False, True]


@pytest.mark.parametrize(
    "argument", ["lambda x: x + k", "[object()]", "functools.partial(max, k)", "Own()"]
)
def test_an_argument_that_cannot_cross_is_no_error_of_the_code(argument: str) -> None:
    """Tests that expect one passed for code that raises none."""
    test = f"""import functools
class Own: pass
def check(k):
    try:
        f({argument}, 2)
    except {{}}:
        return
    assert False
check(1)"""
    expecting = [test.format(kind) for kind in ("TypeError", "Exception", "BaseException")]
    # the next test has nothing to do with it
    tests = [*expecting, "assert f(1, 2) == 0"]
    assert run_tests("def f(g, x): return 0", tests) == [False, False, False, True]


def test_functions_keep_all_kinds_of_defaults() -> None:
    tests = ["assert f(lambda x, y=(1, 2), *, z={3}: [x, y, z]) == [0, (1, 2), {3}]"]
    assert run_tests("def f(g): return g(0)", tests) == [True]


def test_an_object_that_is_returned_twice_is_one() -> None:
    code = "def one(): return f\ndef f(n): return lambda x: x + n"
    tests = ["assert one() is one()", "assert one() is not one()", "assert one() != one()"]
    tests += ["assert f(1) is not f(1)", "assert f(1)(2) == 3", "assert f(1)(2) == 4"]
    assert run_tests(code, tests) == [True, False, False, True, True, False]


def test_errors_keep_their_arguments_and_the_builtin_kind_that_they_derive_from() -> None:
    code = "import json\ndef f(x):\n    return json.loads(x)\ndef g(x):\n    raise KeyError(x)"
    tests = [
        "try:\n    f('{')\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    g('a')\nexcept KeyError as e:\n    assert e.args == ('a',)",
    ]
    assert run_tests(code, tests) == [True, True]


def test_dataclasses_with_postponed_annotations_can_be_defined() -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    code += "from typing import Optional\n@dataclass\nclass P:\n    x: Optional[int] = None\n"
    assert run_tests(code + "def f():\n    return P(3).x", ["assert f() == 3"]) == [True]


@pytest.mark.slow
def test_code_that_breaks_every_worker_fails_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # what a candidate returns may keep a test in C code, which no signal interrupts
    monkeypatch.setattr("minigrpo.sandbox.workers.GRACE_S", 1.0)
    sandbox = Sandbox()
    code, test = "def f(): return range(10 ** 12)", ["assert sum(f()) == 1"]
    assert sandbox.run_tests(code, test, timeout_s=0.1) == [False]
    assert sandbox.run_tests(RIGHT, TESTS[:2]) == [True, True]
    sandbox.close()


def test_a_system_that_breaks_every_worker_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Worker, job: object) -> list[bool]:
        raise BrokenWorkerError("killed")

    sandbox = Sandbox()
    worker = Worker()
    monkeypatch.setattr(sandbox, "_take", lambda: worker)
    monkeypatch.setattr(Worker, "run", killed)
    with pytest.raises(SandboxError, match="killed"):
        sandbox.run_tests(RIGHT, TESTS)
    worker.close()


def test_tests_may_not_take_all_of_the_memory(sandbox: Sandbox) -> None:
    tests = ["assert len(bytes(f())) == 2 ** 31", "assert f() == 2 ** 31"]
    assert sandbox.run_tests("def f(): return 2 ** 31", tests) == [False, True]


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigrpo.sandbox.workers.START", "raise OSError('no more room')")
    with pytest.raises(SandboxError, match="does not start: .*no more room"):
        Worker()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="does not start: No such file"):
        Worker()
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SandboxError, match="Linux only"):
        Worker()


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    script = """
from minigrpo.sandbox.workers import Sandbox
sandbox = Sandbox()
sandbox.run_tests('', [])
(worker,) = sandbox._idle
print(worker.process.pid, flush=True)
sandbox.run_tests('while True: pass', ['assert False'], timeout_s=0.1)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH + script, str(PACKAGE)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert trainer.stdout
    pid = int(trainer.stdout.readline())
    deadline = time.monotonic() + 8  # the program is forked after the line
    while len(everyone := [pid, *descendants(pid)]) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(everyone) == 4  # the worker, its server, the candidate and its judge
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 8
    while set(everyone) & parents().keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(everyone) & parents().keys()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_worker_that_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed, alive = Worker(), Worker()
    both = set(tmp_path.iterdir())
    pids = {killed.process.pid, *descendants(killed.process.pid)}
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended with its parent
            os.kill(pid, signal.SIGKILL)
    killed.close()
    deadline = time.monotonic() + 8
    while pids & parents().keys() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(tmp_path.iterdir()) == both and len(both) == 2
    third = Worker()
    (kept,) = both & set(tmp_path.iterdir())
    assert alive.run(HARMLESS) == third.run(HARMLESS) == [True]
    alive.close()
    assert not kept.exists()
    third.close()
    assert not list(tmp_path.iterdir())


def test_messages_keep_types_and_refuse_what_is_none() -> None:
    def never(*args: object) -> object:
        raise TypeError

    assert wire.decode(wire.encode({(1, 2): [{3}]}, never), never) == {(1, 2): [{3}]}
    wrong: list[object] = [{}, {"tuple": 1}, {"a": 1, "b": 2}, {"set": [[1]]}, {"range": ["a"]}]
    for message in [*wrong, {"unknown": 1}]:
        with pytest.raises((TypeError, ValueError)):
            wire.decode(message, never)


def test_daemons_and_their_children_are_killed() -> None:
    """Without the hooks, which refuse to start any."""
    script = """
import os, time
from minigrpo.sandbox import isolation, server
isolation.adopt_orphans()
reader, writer = os.pipe()
if not os.fork():
    for _ in range(3):
        os.setsid() if os.getpid() != os.getsid(0) else None
        if os.fork() and os.fork():
            os.write(writer, b"y")
            os._exit(0)
    os.write(writer, b"y")
    time.sleep(1000)
os.close(writer)
time.sleep(0.1)
print(len(isolation.children()))
server._end_all()
print(isolation.children(), len(os.read(reader, 100)) > 3)
"""
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + script, str(PACKAGE)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert told.stdout.split("\n")[1:2] == ["[] True"], told.stderr
    assert int(told.stdout.split()[0]) >= 1

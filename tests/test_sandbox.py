"""Code that a model wrote: only right values pass, and nothing is left of it."""

import io
import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minigrpo.sandbox import client, run_tests
from minigrpo.sandbox.worker import frame, receive

from .tiny import descendants, wait_until

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code runs on Linux only")

# Programs that models write by accident, or that reinforcement finds. None of them solves the
# tests; each tries to pass, to stay, to reach outside, or to never end. `OUTSIDE` is the path of a
# folder that it must not change.
TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert not f(-1)"]
RIGHT = "def f(x): return x + 1"
HOSTILE = {
    "exit": "import os\ndef f(x): return x + 1\nos._exit(0)",
    "SystemExit": "import sys\ndef f(x): return x + 1\nsys.exit(0)",
    "memory": "a = 'y' * 10**12",
    "large text": "def f(x): return 'y' * 10**7",
    "fills the disk": "for i in range(10**6): open(str(i), 'w').write('y' * 10**6)",
    "patched assert": "import builtins as b\nb.AssertionError = SystemExit\ndef f(x): assert False",
    "equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): raise SystemExit
def f(x): return Equal()
""",
    "a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __index__(self): return 2
    def __int__(self): return 4
    __hash__ = int.__hash__
def f(x): return Equal(7)
""",
    "patched builtins": """
import builtins
for name in ('all', 'any', 'isinstance', 'type', 'len', 'set', 'repr', 'compile', 'exec', 'eval'):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return 7
""",
    "patched json": "import json\njson.dumps = lambda *a, **k: '[2]'\ndef f(x): return 7",
    "forgets the modules": "import sys\nsys.modules.clear()\ndef f(x): return 7",
    "answers without the key": """
import os
for answer in ('null', '2', '3', 'null'):  # the program, and TESTS
    for fd in range(64):
        try: os.write(fd, f'[{answer}]\\n'.encode() * 2)
        except OSError: pass
def f(x): return 7
""",
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef f(x): return x + 1",
    "stdin": "def f(x): return int(input()) + 1",
    "looks for the tests": """
import gc, sys
frame, texts = sys._getframe(), []
while frame:
    texts += [repr(value) for value in frame.f_locals.values()]
    frame = frame.f_back
texts += [x for x in gc.get_objects() if isinstance(x, str)]
found = any('== 2' in x and 'assert f(' in x for x in texts)
def f(x): return x + 1 if found else 7
""",
    "looks for the last answer": """
import sys
import time
frame, found = sys._getframe(), False
while frame:
    found = found or any(x in (3, [3], b'[3]\\n') for x in frame.f_locals.values())
    frame = frame.f_back
def f(x): return x + 1 if found else 7
""",
    "reads the memory": "open('/proc/self/mem', 'r+b')",
    "endless generator": "def f(x):\n    while True: yield x",
    "nested list": "a = []\nfor _ in range(10**5): a = [a]\ndef f(x): return a",
    "brackets": "f = " + "(" * 50_000 + ")" * 50_000,
    "recursion": "def f(x): return f(x)",
    "zero byte": "def f(x): return x + 1\n\0",
    "lone surrogate": "f = '\ud800'",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 7",
    "forks": "import os\nos.fork()\ndef f(x): return x + 1",
    "daemon": "import os\nif os.fork() == 0: os.setsid()\nwhile True: pass",
    "command": "import subprocess\nsubprocess.Popen(['sleep', '7531'], start_new_session=True)",
    "C code": "import ctypes\nctypes.string_at(0)",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "writes outside": "open('OUTSIDE/kept', 'w').write('y')",
    "spawns": "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()",
    "writes through a link": "import os\nos.symlink('OUTSIDE/kept', 'a')\nopen('a', 'w')",
    "removes": "import os\nos.remove('OUTSIDE/kept')",
    "renames": "import os\nos.rename('OUTSIDE/kept', 'OUTSIDE/other')",
    "makes a pipe": "import os\nos.mkfifo('OUTSIDE/pipe')",
    "changes rights": "import os\nos.chmod('OUTSIDE/kept', 0)",
    "database": "import sqlite3\nsqlite3.connect('OUTSIDE/base').execute('create table a (b)')",
    "walks the disk": """
import os
found = [os.path.join(a, x) for a, _, files in os.walk('/') for x in files]
texts = [open(x, errors='replace').read() for x in found + ['OUTSIDE/kept', 'OUTSIDE/../kept']]
def f(x): return x + 1
""",
}
# Statements that raise no event for an audit hook: they run in another interpreter, or in C. Where
# one of them succeeds, the program solves the tests.
IN_ANOTHER_INTERPRETER = """
try:
    import _interpreters
    interpreter, run = _interpreters.create('legacy'), _interpreters.exec
except ImportError:
    import _xxsubinterpreters as _interpreters
    interpreter, run = _interpreters.create(isolated=False), _interpreters.run_string
if run(interpreter, STATEMENTS) is not None: raise OSError
def f(x): return x + 1
"""
SHARED = Path("/dev/shm/minigrpo-test")
PAST_THE_HOOK = {
    "writes": "open('OUTSIDE/kept', 'w')",
    "reads": "open('OUTSIDE/kept').read()",
    "lists": "import os; os.listdir('OUTSIDE')",
    "removes": "import os; os.remove('OUTSIDE/kept')",
    "empties": "import os; os.truncate('OUTSIDE/kept', 0)",
    "changes rights": "import os; os.chmod('OUTSIDE/kept', 0)",
    "makes a pipe": "import os; os.mkfifo('OUTSIDE/pipe')",
    "kills its parent": "import os; os.kill(os.getppid(), 9)",
    "limits its parent": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (0, 0))",
    "slows its parent": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "signals by a descriptor": "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "reads its parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "traces its parent": "import ctypes, os; 1 / (1 + ctypes.CDLL(None).ptrace(16, os.getppid()))",
    "forks": "import os; os.fork()",
    "command": "import os; os.posix_spawn('/bin/sleep', ['sleep', '7531'], {})",
    "socket": "import socket; socket.socket()",
    "datagrams": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "pair of sockets": "import socket; socket.socketpair()",
    "file in memory": "import os; os.memfd_create('y')",
    "shared memory": f"import _posixshmem; _posixshmem.shm_open('/{SHARED.name}', 66, 0o600)",
    "System V's": "import ctypes; 1 / (1 + ctypes.CDLL(None).shmget(0, 9, 0o600))",
    "queue": "import ctypes; 1 / (1 + ctypes.CDLL(None).mq_open(b'/y', 66, 0o600, None))",
}
IN_C = (
    "import readline; readline.read_init_file('OUTSIDE/kept')\ndef f(x): return x + 1",
    f"import _posixshmem; _posixshmem.shm_open('/{SHARED.name}', 66, 0o600)\n{RIGHT}",
)
ENDLESS = {
    "loop": "while True: pass",
    "ignores signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "output": "while True: print('y' * 100_000)",
    "memory, caught": """
a = []
while True:
    try:
        while True: a.append(' ' * 10**6)
    except MemoryError: pass
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except BaseException: pass
""",
    "threads": """
import threading
def run():
    while True: pass
for _ in range(100):
    try: threading.Thread(target=run).start()
    except RuntimeError: break
def f(x): threading.Event().wait()
""",
}


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 60.0)  # other tests may use the cores
    client._idle.clear()


def program_of(worker: client.Worker) -> int:
    """The one process of a worker, when the last program has been ended."""
    pids = []

    def only_one_is_there() -> bool:
        pids[:] = descendants(worker.process.pid)
        return len(pids) == 1

    wait_until(only_one_is_there, seconds=20)
    return pids[0]


def state_of(path: Path) -> tuple[int, int]:
    """Its rights, and when it was changed."""
    stat = path.stat()
    return stat.st_mode, stat.st_mtime_ns


def check_hostile(code: str, outside: Path, timeout_s: float) -> None:
    """A program fails, changes nothing, and the same worker is ready for the next one."""
    (outside / "kept").write_text("as it was")
    before = {path: state_of(path) for path in (outside, outside / "kept")}
    assert run_tests(RIGHT, TESTS[:2]) == [True, True]
    (first,) = client._idle
    verdicts = run_tests(code.replace("OUTSIDE", str(outside)), TESTS, timeout_s=timeout_s)
    assert verdicts == [False] * len(TESTS)
    assert client._idle == [first]
    program_of(first)
    assert {path: state_of(path) for path in before} == before
    assert [path.name for path in outside.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("codes", "timeout_s"), [(HOSTILE, 5.0), pytest.param(ENDLESS, 0.3, marks=pytest.mark.slow)]
)
def test_hostile_code_fails_and_leaves_nothing(
    codes: dict[str, str], timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WALL_EXTRA_S", timeout_s)
    for code in codes.values():
        check_hostile(code, tmp_path, timeout_s=timeout_s)


def in_another_interpreter(statements: str) -> str:
    return IN_ANOTHER_INTERPRETER.replace("STATEMENTS", repr(statements))


def test_the_kernel_stops_what_passes_the_hook(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as gaps:
        warnings.simplefilter("always")
        assert run_tests(in_another_interpreter(""), TESTS[:2]) == [True, True]
    if gaps:
        pytest.skip(str(gaps[0].message))
    for code in (*map(in_another_interpreter, PAST_THE_HOOK.values()), *IN_C):
        check_hostile(code, tmp_path, timeout_s=5.0)
        assert not SHARED.exists()


def test_a_kernel_that_takes_no_rules_is_said_once_and_right_code_passes() -> None:
    script = f"""
import ctypes
from minigrpo.sandbox import run_tests
seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
rules = ctypes.c_void_p(seccomp.seccomp_init(0x7FFF0000))
for name in (b"landlock_create_ruleset", b"seccomp", b"prctl"):
    number = seccomp.seccomp_syscall_resolve_name(name)
    seccomp.seccomp_rule_add_array(rules, 0x50001, number, 0, None)  # not permitted
assert seccomp.seccomp_load(rules) == 0
for code in ({RIGHT!r}, {RIGHT!r}, {HOSTILE["forks"]!r}, {HOSTILE["walks the disk"]!r}):
    print(run_tests(code, {TESTS[:1]}))
"""
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[True]", "[True]", "[False]", "[False]"]
    assert done.stderr.count("Warning") == 1


def test_code_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WALL_EXTRA_S", 0.5)
    late = "def f(x):\n    while x > 1: pass\n    return x + 1"
    assert run_tests(late, TESTS[:2], timeout_s=0.3) == [True, False]


def test_a_pause_of_the_machine_makes_no_right_program_wrong() -> None:
    client._idle.append(client.Worker())
    program = program_of(client._idle[0])
    stop = f"import os, time; os.kill({program}, 19); time.sleep(1.5); os.kill({program}, 18)"
    with subprocess.Popen([sys.executable, "-c", stop]):
        stat = Path(f"/proc/{program}/stat")
        wait_until(lambda: "T" in stat.read_text().rpartition(")")[2][:3])
        assert run_tests(RIGHT, TESTS[:1], timeout_s=0.2) == [True]


# --- right code passes ----------------------------------------------------------------------------

PASSING = {  # code, and its tests
    "values": (
        "def f(x): return x",
        *(f"assert f({x}) == {x}" for x in ("None", "True", "1.5", "-1j", "'a\\ud800'", "b'b'")),
        *(f"assert f({x}) == {x}" for x in ("(1, [2])", "{1: (2,)}", "{3}", "[[], {}]", "2**70")),
        *("assert f(float('inf')) == float('inf')", "assert f(float('nan')) != f(float('nan'))"),
        *("assert f(frozenset([(5,)])) == {(5,)}", "assert f({frozenset()}) == {frozenset()}"),
        "assert f((1, 2)) != [1, 2] and f([1]) != (1,) and f(1) == True",
        "assert f(5) is not None and f(None) is None and 1 < f(2) < 3 and f(2) in (1, 2)",
    ),
    "subclasses and views": (
        "from collections import *\nf = Counter\ng = namedtuple('G', 'a b')",
        *("assert f('aab') == {'a': 2, 'b': 1}", "assert g(1, 2) == (1, 2)"),
        "assert f('ab').keys() == {'a', 'b'}",
    ),
    "dates": (
        "from datetime import *\ndef f(x): return x + timedelta(1)",
        "assert f(date(2020, 2, 28)) == date(2020, 2, 28) + timedelta(1)",
    ),
    "the library on the right": (
        "import math\ndef f(x): return x ** 0.5",
        *("assert math.isclose(f(2), 1.4142135, rel_tol=1e-6)", "assert f(4) == math.sqrt(4)"),
        *("assert set([f(1)]) == set([1.0])", "assert f(9) == sum([1, 2]) and f(9) < max(1, 4)"),
    ),
    "functions of the tests": (
        "def f(g, x): return g(x)",
        *("assert f(lambda x, y=1: x + y, 2) == 3", "assert f(abs, -1) == 1"),
    ),
    "named like a builtin": ("def sum(a, b): return a * b", "assert sum(3, 5) == 15"),
    "state": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        *("assert f() == 1", "assert f() == 2", "assert f() == 3 and f() == 4", "assert f() == 5"),
    ),
    "the standard library": (
        "import json, difflib, hashlib, decimal, unicodedata, string, zoneinfo\ndef f(x): return 1",
        "assert f(0) == 1",
    ),
    "threads and C libraries": (
        "import threading, hashlib, zlib, sqlite3, time\ndef f(x):\n    values = []\n"
        "    thread = threading.Thread(target=values.append, args=[x])\n    thread.start()\n"
        "    thread.join()\n    time.sleep(0.001)\n"
        "    return values, hashlib.sha256(b'').hexdigest()[:4], zlib.crc32(b'y')",
        "assert f(2) == ([2], 'e3b0', 4225443349)",
    ),
    "dataclasses with annotations as texts": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int = 3\ndef f(): return P().x",
        "assert f() == 3",
    ),
}


def test_right_code_passes() -> None:
    for name, (code, *tests) in PASSING.items():
        assert run_tests(code, tests) == [True] * len(tests), name


# --- only right values pass -----------------------------------------------------------------------


def test_a_program_cannot_change_what_it_is_compared_with() -> None:
    code = "import builtins\nbuiltins.set = builtins.float = lambda *a: 7\ndef f(x): return 7"
    tests = ["assert f(1) == set([1])", "assert f(1) == float('inf')", "assert f(1) != 7"]
    assert run_tests(code, [*tests, "assert f(1) == 7"]) == [False, False, False, True]
    # nor find it: its process has never had it
    code = "import sys\ndef f(): return getattr(sys, 'expected', 6)"
    test = "assert f() == (setattr(__import__('sys'), 'expected', 5) or 5)"
    assert run_tests(code, [test]) == [False]


def test_what_a_test_prints_or_raises_is_no_verdict() -> None:
    for test in (
        "print('x' * 200_000, flush=True)",  # more than a pipe holds
        "import os; os.close(0); os.close(1); os.close(2)",
    ):
        assert run_tests(RIGHT, [test, "assert f(1) == 3"]) == [True, False]
        assert run_tests(RIGHT, ["assert f(1) == 2"], setup=test) == [True]
    # nor are those of other tests, if one is not Python or raises
    tests = ["assert f(", "assert f(1) < None", "assert g(1) == 2", "assert f(1) == 2"]
    assert run_tests(RIGHT, tests) == [False, False, False, True]
    assert run_tests(RIGHT, TESTS[:1], setup="1 / 0") == [False]


def test_one_program_sees_nothing_of_another() -> None:
    assert run_tests("import math\nmath.x = 1", []) == []
    code = "import math, os\ndef f(): return [hasattr(math, 'x'), dict(os.environ)]"
    assert run_tests(code, ["assert f() == [False, {}]"]) == [True]


def test_values_keep_their_types_and_others_are_refused() -> None:
    value = {(1, 2): [{3}, "x", 2**70, None, True, 1.0, {"a": ()}]}
    received = receive(io.BytesIO(frame(value)))
    assert received == value
    assert [*map(type, received[1, 2][2:])] == [*map(type, value[1, 2][2:])]
    for wrong in (b"", b"[", b'{"tuple": 1}', b"{}", b'{"frozenset": [[]]}', b'{"x": []}'):
        with pytest.raises((TypeError, ValueError, KeyError)):
            receive(io.BytesIO(wrong))
    with pytest.raises(TypeError):
        frame([object()])


# --- workers --------------------------------------------------------------------------------------


def test_workers_that_were_killed_are_replaced_and_the_job_is_done() -> None:
    client._idle += [client.Worker() for _ in range(3)]
    for worker in client._idle:
        worker.process.kill()
    for _ in range(len(client._idle) + 1):
        assert run_tests(RIGHT, TESTS[:1]) == [True]


def test_signals_that_ask_the_run_to_stop_end_no_program() -> None:
    client._idle.append(client.Worker())
    worker = client._idle[0].process.pid
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        for pid in (program_of(client._idle[0]), worker):
            os.kill(pid, signal.Signals[name])
    assert run_tests(RIGHT, TESTS[:1]) == [True]
    assert [one.process.pid for one in client._idle] == [worker]


def test_code_runs_again_after_a_pause_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [[False], [True], [False]]
    monkeypatch.setattr(client, "run_once", lambda *_: verdicts.pop(0))
    ran = [100.0, 100.0]
    monkeypatch.setattr(client, "running_seconds", lambda: ran.pop(0))
    clock = iter([1000.0, 1002.0, 1003.0, 1003.5])
    monkeypatch.setattr(client.time, "monotonic", lambda: next(clock))
    assert run_tests(RIGHT, TESTS[:1]) == [True]
    ran += [102.0, 102.5]
    assert run_tests(RIGHT, TESTS[:1]) == [False]


def test_threads_run_programs_side_by_side_without_mixing_them_up() -> None:
    def check(number: int) -> list[bool]:
        code = f"import time\ntime.sleep(0.2)\ndef f(): return {number}"
        return run_tests(code, [f"assert f() == {number}", f"assert f() == {number + 1}"])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(check, range(8))) == [[True, False]] * 8
    assert len(client._idle) <= 4


def test_a_system_that_starts_no_worker_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(OSError):
        run_tests(RIGHT, TESTS)


def test_nothing_is_left_when_the_trainer_is_killed() -> None:
    script = """
from minigrpo.sandbox import client
client.run_tests('', [])
print(client._idle[0].process.pid, flush=True)
client.run_tests('while True: pass', ['assert False'], timeout_s=100)
"""
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    pid = int(trainer.stdout.readline())
    everyone = [pid, *descendants(pid)]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in everyone))

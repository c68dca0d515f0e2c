"""Code that a model wrote: only right values pass, and nothing is left of it."""

import io
import os
import signal
import subprocess
import sys
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minigrpo.sandbox import client
from minigrpo.sandbox.client import run_tests
from minigrpo.sandbox.worker import frame, receive

from .tiny import ROOT, descendants, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code runs on Linux only")
PROGRAMS = tomllib.loads((ROOT / "tests/programs/sandbox.toml").read_text("utf-8"))
TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert not f(-1)"]
RIGHT = "def f(x): return x + 1"
HOSTILE = {
    **PROGRAMS["hostile"],
    "brackets": "f = " + "(" * 50_000 + ")" * 50_000,
    "lone surrogate": "f = '\ud800'",
}
SHARED = Path("/dev/shm/minigrpo-test")


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
    ("codes", "timeout_s"),
    [(HOSTILE, 5.0), pytest.param(PROGRAMS["endless"], 0.3, marks=pytest.mark.slow)],
)
def test_hostile_code_fails_and_leaves_nothing(
    codes: dict[str, str], timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WALL_EXTRA_S", timeout_s)
    for code in codes.values():
        check_hostile(code, tmp_path, timeout_s=timeout_s)


def test_the_kernel_stops_what_passes_the_hook(tmp_path: Path) -> None:
    def in_another_interpreter(statements: str) -> str:
        code: str = PROGRAMS["in_another_interpreter"]["code"]
        return code.replace("STATEMENTS", repr(statements))

    with warnings.catch_warnings(record=True) as gaps:
        warnings.simplefilter("always")
        assert run_tests(in_another_interpreter(""), TESTS[:2]) == [True, True]
    if gaps:
        pytest.skip(str(gaps[0].message))
    past_the_hook = map(in_another_interpreter, PROGRAMS["past_the_hook"].values())
    for code in (*past_the_hook, *PROGRAMS["in_c"].values()):
        check_hostile(code.replace("SHARED", SHARED.name), tmp_path, timeout_s=5.0)
        assert not SHARED.exists()


def command_of(script: str, *arguments: str) -> dict[str, Any]:
    """What runs one of the scripts in another process."""
    command = [sys.executable, "-c", PROGRAMS["scripts"][script], *arguments]
    return {"args": command, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def test_a_kernel_that_takes_no_rules_is_said_once_and_right_code_passes() -> None:
    codes = [RIGHT, RIGHT, HOSTILE["forks"], HOSTILE["walks the disk"]]
    command = command_of("tests programs without a kernel's rules", *codes)
    done = subprocess.run(**command, capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("name", PROGRAMS["passing"])
def test_right_code_passes(name: str) -> None:
    program = PROGRAMS["passing"][name]
    tests = program["tests"].splitlines()
    assert run_tests(program["code"], tests) == [True] * len(tests)


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
    command = command_of("has a program without an end")
    trainer = subprocess.Popen(**command, stdout=subprocess.PIPE)
    pid = int(trainer.stdout.readline())
    everyone = [pid, *descendants(pid)]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in everyone))

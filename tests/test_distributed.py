"""`torchrun distributed_train.py` as a user starts it, and with failing processes.

Gradients are compared in test_invariance.py.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Config, Trainer
from minigrpo.runtime.combinations import check_shares
from minigrpo.runtime.flags import ConfigError

from .gradients import TINY

pytestmark = pytest.mark.usefixtures("no_orphans")
ROOT = Path(__file__).parent.parent
FAULTY = str(ROOT / "tests" / "faulty_task.py")
OPTIONS: dict[str, Any] = {
    **TINY,
    "task": FAULTY,
    "reward_weights": "",
    "max_steps": 20,
    "eval_every": 0,
    "save_every": 3,
}


def command(*launcher: str, processes: int = 2, **changes: Any) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={processes}",
        *launcher,
        "distributed_train.py",
    ]
    for name, value in {**OPTIONS, **changes}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def start(
    *launcher: str, env: dict[str, str] | None = None, processes: int = 2, **changes: Any
) -> subprocess.Popen[str]:
    """torchrun in a session of its own, so that nothing of it outlives the test."""
    if not any("rdzv" in word for word in launcher):
        launcher = ("--standalone", *launcher)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command(*launcher, processes=processes, **changes)
    return subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(folder: Path, pattern: str, seconds: float = 60) -> None:
    """Until there is a file that the pattern fits."""
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern} in {folder}"
        time.sleep(0.02)


def weights(folder: Path) -> tuple[int, str]:
    """Step, and sha256 of the model and the optimizer in the newest checkpoint."""
    newest = max(
        (folder / "checkpoints").glob("step_*/state.pt"), key=lambda path: path.parent.name
    )
    state = torch.load(newest, weights_only=True)
    digest = hashlib.sha256()
    for part in (state["model"], *state["optimizer"]["state"].values()):
        for name in sorted(part):
            digest.update(torch.as_tensor(part[name]).numpy().tobytes())
    return state["step"], digest.hexdigest()


def summary(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    process = start(out_dir=folder)
    output = finish(process)
    assert process.returncode == 0, output
    assert (
        "grpo: 4 prompts x 3 completions per step, on 2 x cpu: "
        "2 prompts per process in 1 micro-batch" in output
    )
    assert output.count("finished (max_steps) at step 20") == 1
    return folder


def test_a_run_of_two_processes_is_one_run(calm: Path) -> None:
    assert {path.name for path in calm.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "eval.jsonl",
        "summary.json",
        "tensorboard",
    }
    metrics = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == list(range(1, 21))
    assert 'processes = "2"' in (calm / "config.toml").read_text()
    assert summary(calm)["status"] == "finished"


def test_two_processes_log_the_metrics_of_one(calm: Path, tmp_path: Path) -> None:
    Trainer(Config.of(**OPTIONS, out_dir=str(tmp_path / "run")), quiet=True).fit()
    one, two = (
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (tmp_path / "run", calm)
    )
    for a, b in zip(one[:3], two[:3], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if "time" not in name and "memory" not in name and "difference" not in name:
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_a_killed_rank_takes_all_down_and_a_restart_ends_with_the_same_bits(
    calm: Path, tmp_path: Path
) -> None:
    env = {"FAULT": "kill", "FAULT_MARKER": str(tmp_path / "marker")}
    process = start("--max-restarts=1", env=env, out_dir=tmp_path / "run", resume="auto")
    output = finish(process)
    assert process.returncode == 0, output
    assert (tmp_path / "marker").exists()
    assert re.search(r"resumed from step \d+", output)
    assert weights(tmp_path / "run") == weights(calm)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_fault_in_one_rank_ends_all_of_them_soon(fault: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    process = start(env={"FAULT": fault, "FAULT_MARKER": str(marker)}, out_dir=tmp_path / "run")
    wait_for(tmp_path, "marker")
    at = time.monotonic()
    output = finish(process)
    assert time.monotonic() - at < 10
    assert process.returncode not in (0, None)
    if fault == "raise":
        assert "RuntimeError: out of luck" in output and "rank 1 of 2, during step" in output


@pytest.mark.slow
def test_a_rank_that_hangs_ends_at_the_timeout_which_names_what_was_waited_for(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    process = start(
        env={"FAULT": "hang", "FAULT_MARKER": str(marker)}, out_dir=tmp_path / "run", pg_timeout=2
    )
    wait_for(tmp_path, "marker")
    at = time.monotonic()
    assert process.stdout is not None
    output = ""
    while (
        "closing signal SIGTERM" not in output
    ):  # then the launcher waits 30 s before it kills the one that hangs
        line = process.stdout.readline()
        assert line, output
        output += line
    assert time.monotonic() - at < 20
    process.kill()
    process.wait()
    process.stdout.close()  # which the one that hangs has open too
    assert re.search(r"rank 0 of 2, during (gather|sum|the update of step 13)", output), output
    assert "rank 0 of 2, during step 13" in output


@pytest.mark.slow
def test_a_long_evaluation_does_not_trip_the_timeout(tmp_path: Path) -> None:
    """Rank 0 evaluates for longer than --pg-timeout, and rank 1 waits."""
    process = start(
        out_dir=tmp_path / "run", pg_timeout=1, max_steps=2, eval_size=1500, max_new_tokens=60
    )
    output = finish(process)
    assert process.returncode == 0, output
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert summary(tmp_path / "run")["wall_seconds"] > 2 + metrics["step_time"]


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        pytest.param("SIGINT", marks=pytest.mark.slow),
        pytest.param("SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_finishes_the_step_and_saves(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",) if name == "SIGUSR1" else ()
    process = start(*launcher, out_dir=folder, max_steps=100_000)
    wait_for(folder, "checkpoints/step_*/manifest.json")
    process.send_signal(getattr(signal, name))
    output = finish(process)
    assert (summary(folder)["status"], summary(folder)["exit_reason"]) == ("stopped", name), output
    assert weights(folder)[0] == summary(folder)["step"] >= 3
    assert "Traceback" not in output.split("torch/distributed")[0]
    assert (
        f"exitcode  : -{getattr(signal, name).value}" not in output
    )  # the workers left by themselves
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(folder) not in listed  # no orphans


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_step(calm: Path, tmp_path: Path) -> None:
    """2 -> 1: the same global batch; gradients of the next step within 1e-5, so the metrics that
    they enter into too.
    """
    process = start(out_dir=tmp_path / "run", stop_after=9)
    assert finish(process) and process.returncode == 0
    words = command(out_dir=tmp_path / "run", resume="auto", stop_after=10)
    words = [sys.executable, "train.py", *words[words.index("distributed_train.py") + 1 :]]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "was written by 2 processes" in done.stderr
    a, b = (
        json.loads((f / "metrics.jsonl").read_text().splitlines()[9])
        for f in (calm, tmp_path / "run")
    )
    for name in ("reward", "loss", "grad_norm", "entropy", "learning_rate", "tokens/repeated"):
        assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
def test_two_agents_meet_on_one_machine(calm: Path, tmp_path: Path) -> None:
    """Multi-node as torchrun does it: an agent for each node, one worker each here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=test",
    ]
    agents = [start(*launcher, processes=1, out_dir=tmp_path / "run") for _ in range(2)]
    outputs = [finish(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert weights(tmp_path / "run") == weights(calm)


@pytest.mark.parametrize(
    ("processes", "changes", "words"),
    [
        (3, {}, "--prompts-per-step 4 does not divide among 3 processes; 3 or 6 would"),
        (8, {}, "--prompts-per-step 4 does not divide among 8 processes; 8 would"),
        (2, {"micro_batch_size": 4}, "--micro-batch-size must divide the 2 prompts of each pro"),
        (2, {"rollout_batch_size": 4}, "--rollout-batch-size must divide the 2 prompts of each"),
    ],
)
def test_what_does_not_divide_is_an_error_that_proposes_sizes(
    processes: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_shares(Config.of(prompts_per_step=4, **changes), processes)
    assert words in str(error.value)


@pytest.mark.slow
def test_what_does_not_divide_ends_torchrun_before_any_work(tmp_path: Path) -> None:
    process = start(processes=3, out_dir=tmp_path / "run")
    output = finish(process)
    assert process.returncode not in (0, None)
    assert "error: --prompts-per-step 4 does not divide among 3 processes; 3 or 6 would" in output
    assert not (tmp_path / "run").exists()

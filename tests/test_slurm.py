"""slurm/grpo.sbatch, with stand-ins for SLURM: checks, signals, requeueing, copies of the run."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_distributed import OPTIONS, wait_for, weights

pytestmark = pytest.mark.usefixtures("no_orphans")
ROOT = Path(__file__).parent.parent
JOB = str(os.getpid())  # the launcher's port depends on it, and two test runs must not share it
SCRIPT = ROOT / "slurm" / "grpo.sbatch"
STANDINS = {
    # drops its own options and becomes the process that it starts, so that signals reach it
    "srun": """while [[ $1 == --* ]]; do shift; done
        [[ ${SLURM_JOB_NUM_NODES:-1} == 2 ]] || exec "$@"
        SLURM_NODEID=1 "$@" & other=$!
        SLURM_NODEID=0 "$@" & first=$!
        trap 'kill -TERM $first $other' TERM
        wait $first; wait $first; code=$?; wait $other; exit $code""",
    "scontrol": """case $1 in
        requeue) echo "$2" >> "$SLURM_TEST/requeued" ;;
        show) echo 127.0.0.1 ;;
        esac""",
    "nvidia-smi": 'for ((i = 0; i < ${FAKE_GPUS:-0}; i++)); do echo "GPU $i"; done',
    "sbatch": 'export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NAME=grpo; exec bash "$@"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment that looks like a SLURM job's."""
    for name, body in STANDINS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    (tmp_path / "local").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_TEST": str(tmp_path),
        "SLURM_JOB_ID": JOB,
        "GRPO_OUT": str(tmp_path / "out"),
        "GRPO_LOCAL": str(tmp_path / "local"),
        "GRPO_PYTHON": sys.executable,
        "GRPO_CHECKPOINT_MB": "1",
        "GRPO_COPY_SECONDS": "0.2",
        "GRPO_PROCESSES": "2",
        "OMP_NUM_THREADS": "1",
    }


def submit(env: dict[str, str], **changes: Any) -> subprocess.Popen[str]:
    words = ["sbatch", str(SCRIPT)]
    for name, value in {**OPTIONS, "device": "cpu", **changes}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **pipes)


@pytest.mark.slow
def test_a_job_runs_with_its_overrides_and_leaves_everything_in_the_out_folder(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = submit(slurm, max_steps=7)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    assert weights(out)[0] == 7
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "step_000006",
        "step_000007",
    ]
    report = (out / "slurm" / f"{JOB}.0" / "job_summary.txt").read_text()
    assert (
        "exit code   0" in report
        and "status      finished (max_steps)" in report
        and "step        7" in report
    )
    assert (
        "finished (max_steps) at step 7" in (out / "slurm" / f"{JOB}.0" / "train.log").read_text()
    )
    assert not list((tmp_path / "local").iterdir())
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_in_mid_run_saves_copies_requeues_and_the_next_part_goes_on(
    name: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if name == "TERM":  # on two nodes of one process each
        slurm |= {"SLURM_JOB_NUM_NODES": "2", "GRPO_PROCESSES": "1"}
    job = submit(slurm, max_steps=100_000)
    wait_for(out, "checkpoints/step_*/manifest.json")  # copied while the job runs
    mine = out / "checkpoints" / "step_000001.keep"  # a copy that somebody keeps
    mine.mkdir()
    os.kill(job.pid, getattr(signal, f"SIG{name}"))
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["exit_reason"]) == ("stopped", f"SIG{name}")
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert weights(out)[0] == summary["step"] and mine.exists()
    assert not list((tmp_path / "local").iterdir())
    where = "2 node(s) x 1 process(es)" if name == "TERM" else "1 node(s) x 2 process(es)"
    assert where in (out / "slurm" / f"{JOB}.0" / "job_summary.txt").read_text()
    assert "on 2 x cpu" in output
    if name == "USR1":
        job = submit(
            {**slurm, "SLURM_RESTART_COUNT": "1"}, max_steps=100_000, stop_after=summary["step"] + 2
        )
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 0, output
        assert f"resumed from step {summary['step']}" in output
        assert weights(out)[0] == summary["step"] + 2
        assert (out / "slurm" / f"{JOB}.1" / "job_summary.txt").exists()


@pytest.mark.slow
def test_the_exit_code_of_a_failed_run_is_its_own(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit({**slurm, "FAULT": "raise", "FAULT_MARKER": str(tmp_path / "marker")})
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1, output
    report = (tmp_path / "out" / "slurm" / f"{JOB}.0" / "job_summary.txt").read_text()
    assert "exit code   1" in report
    assert "out of luck" in (tmp_path / "out" / "slurm" / f"{JOB}.0" / "train.log").read_text()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_what_cannot_be_copied_stays_where_it_is_and_what_cannot_be_fetched_too(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """tar fails. At the end only the local run is whole, and must stay; at the start only the one
    in GRPO_OUT is.
    """
    out, broken = tmp_path / "out", tmp_path / "bin" / "tar"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    slurm["GRPO_PROCESSES"] = "1"
    job = submit(slurm, max_steps=4)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1 and "could not be copied" in output
    assert weights(next((tmp_path / "local").glob("*/run")))[0] == 4
    (out / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
    kept = out / "checkpoints" / "step_000002" / "state.pt"
    kept.write_text("precious")
    job = submit({**slurm, "GRPO_LOCAL": str(tmp_path)}, max_steps=4)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1, output
    assert kept.read_text() == "precious"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_GPUS_ON_NODE": "2", "FAKE_GPUS": "1"}, "SLURM gave 2 GPUs, 1 are visible"),
        ({}, "this job has no GPU: ask for some (--gpus-per-node), or train on CPU with --device"),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, "SLURM_GPUS_ON_NODE is 'gpu:2', not a number of GPUs"),
        ({"GRPO_CHECKPOINT_MB": "999999999"}, "three checkpoints need 2999999997: free some"),
        ({"GRPO_LOCAL": "/nowhere"}, "GRPO_LOCAL=/nowhere is not a folder"),
        ({"GRPO_OUT": "/dev/null/run"}, "GRPO_OUT=/dev/null/run cannot be made"),
        ({"GRPO_PYTHON": "/bin/false"}, "/bin/false cannot import minigrpo"),
    ],
)
def test_what_is_missing_is_reported_before_any_work(
    slurm: dict[str, str], env: dict[str, str], words: str
) -> None:
    asks_for_cpu = {} if "GPU" in words else {"device": "cpu"}
    job = submit({**slurm, **env}, **{"device": "auto", **asks_for_cpu})
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2
    assert output.startswith("error: ") and words in output and output.count("\n") == 1


def test_a_job_that_is_preempted_before_it_begins_is_queued_again(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """While the run of an earlier part is fetched, which therefore stays as it is."""
    kept = tmp_path / "out" / "checkpoints" / "step_000002" / "state.pt"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    fetching, slow = tmp_path / "fetching", tmp_path / "bin" / "tar"
    slow.write_text(f"#!/bin/sh\ntouch {fetching}\nsleep 2\nexit 1\n")
    slow.chmod(0o755)
    job = submit(slurm)
    wait_for(tmp_path, "fetching")
    os.kill(job.pid, signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "SIGTERM" in output
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert kept.read_text() == "precious" and [*kept.parent.iterdir()] == [kept]


def test_checkpoints_behind_a_link_are_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path)
    job = submit(slurm)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2 and "checkpoints is a link: GRPO_OUT must hold it itself" in output


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_with_other_files_is_left_alone(
    slurm: dict[str, str], tmp_path: Path, linked: bool
) -> None:
    (tmp_path / ("real" if linked else "out")).mkdir()
    if linked:
        (tmp_path / "out").symlink_to(tmp_path / "real")
    precious = tmp_path / "out" / "model.safetensors"
    precious.write_text("precious")
    job = submit(slurm, max_steps=2)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2 and "holds other files (model.safetensors)" in output
    assert precious.read_text() == "precious" and len(list(precious.parent.iterdir())) == 1


def test_the_folder_of_the_run_is_no_argument(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit(slurm, out_dir=str(tmp_path / "run"))
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2
    assert output == "error: --out-dir: the run's folder is GRPO_OUT, see the script\n"


def test_a_folder_that_another_job_writes_to_is_left_alone(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = submit(slurm, max_steps=2)
        output = job.communicate(timeout=60)[0]
    assert job.returncode == 2 and "another run or job writes to GRPO_OUT" in output
    assert not list((tmp_path / "out" / "slurm").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_a_part_that_was_queued_again_resumes_where_the_last_one_ended(
    slurm: dict[str, str], tmp_path: Path, begun: bool
) -> None:
    """Not at the step of --resume, unless the part before was stopped before it got there."""
    slurm["GRPO_PROCESSES"] = "1"
    for part, steps in enumerate((4, 6)):
        options = {"resume": 3} if part else {}
        job = submit({**slurm, "SLURM_RESTART_COUNT": str(part)}, max_steps=steps, **options)
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 0, output
        marker = tmp_path / "out" / "slurm" / f"{JOB}.begun"
        assert marker.exists()
        if not begun:
            marker.unlink()
    assert f"resumed from step {4 if begun else 3}" in output
    assert weights(tmp_path / "out")[0] == 6


@pytest.mark.slow
def test_what_could_not_be_copied_is_what_the_next_part_resumes(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """On the same node. If another part has gone on elsewhere, it is the run in GRPO_OUT."""
    out, left = tmp_path / "out", tmp_path / "local" / f"grpo-{JOB}" / "run"
    slurm["GRPO_PROCESSES"] = "1"
    submit(slurm, max_steps=4).communicate(timeout=120)
    newer = tmp_path / "newer"
    shutil.copytree(out, newer)
    for half in ("state.pt", "manifest.json"):  # as a full disk leaves it
        (out / "checkpoints" / "step_000004" / half).unlink()
    (out / "checkpoints" / "step_000004" / "state.pt").touch()
    part = (out / "slurm" / "part").read_text()
    assert part == f"{JOB}.0\n"
    for restart, step in ((1, 4), (2, 6)):  # then what is left is not of the last part
        shutil.copytree(newer, left, ignore=shutil.ignore_patterns("slurm"))
        (left.parent / "part").write_text(part)
        slurm["SLURM_RESTART_COUNT"] = str(restart)
        job = submit(slurm, max_steps=step + 2)
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 0, output
        assert f"resumed from step {step}" in output and "damaged" not in output
        assert weights(out)[0] == step + 2
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
        assert steps == list(range(1, step + 3))
        aside = list(left.parent.glob("run.*"))
        assert not left.exists() and len(aside) == restart - 1
    assert weights(aside[0])[0] == 4


def test_without_an_allocation_it_says_how_to_start_it(slurm: dict[str, str]) -> None:
    del slurm["SLURM_JOB_ID"]
    done = subprocess.run(["bash", SCRIPT], env=slurm, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: no SLURM allocation: start this with sbatch slurm/grpo.sbatch\n"


def test_it_never_chooses_devices_itself() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in SCRIPT.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

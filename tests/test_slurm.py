"""slurm/grpo.sbatch, with stand-ins for SLURM: checks, signals, requeueing."""

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
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_TEST": str(tmp_path),
        "SLURM_JOB_ID": JOB,
        "GRPO_OUT": str(tmp_path / "out"),
        "GRPO_PYTHON": sys.executable,
        "GRPO_CHECKPOINT_MB": "1",
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
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = submit({**slurm, "GRPO_PYTHON": str(python)}, max_steps=7)
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
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_in_mid_run_saves_requeues_and_the_next_part_goes_on(
    name: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if name == "TERM":  # on two nodes of one process each
        slurm |= {"SLURM_JOB_NUM_NODES": "2", "GRPO_PROCESSES": "1"}
    job = submit(slurm, max_steps=100_000)
    wait_for(out, "checkpoints/step_*/manifest.json")
    os.kill(job.pid, getattr(signal, f"SIG{name}"))
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["exit_reason"]) == ("stopped", f"SIG{name}")
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert weights(out)[0] == summary["step"]
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


def test_the_free_space_is_read_also_where_the_device_has_a_space_in_its_name(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """As //nas/my share has; `df -P` then has one column more."""
    df = tmp_path / "bin" / "df"
    df.write_text(
        """#!/usr/bin/env bash
        if [[ " $* " == *" --output=avail "* ]]; then printf 'Avail\\n   2\\n'; else
            printf 'Filesystem 1048576-blocks Used Available Capacity Mounted on\\n'
            printf '//nas/my share 30 28 2 94%% /mnt\\n'
        fi"""
    )
    df.chmod(0o755)
    output = submit({**slurm, "SLURM_GPUS_ON_NODE": "0"}).communicate(timeout=60)[0]
    assert "has 2 MB free, three checkpoints need 3" in output


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_GPUS_ON_NODE": "2", "FAKE_GPUS": "1"}, "SLURM gave 2 GPUs, 1 are visible"),
        ({}, "this job has no GPU: ask for some (--gpus-per-node), or train on CPU with --device"),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, "SLURM_GPUS_ON_NODE is 'gpu:2', not a number of GPUs"),
        ({"GRPO_CHECKPOINT_MB": "999999999"}, "three checkpoints need 2999999997: free some"),
        ({"GRPO_OUT": "/dev/null/run"}, "GRPO_OUT=/dev/null/run cannot be made or written"),
        ({"GRPO_OUT": "~/runs/a"}, "~ is not your home folder here, write $HOME instead"),
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
    slow = tmp_path / "a folder" / "python"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path / 'checking'}\nsleep 1\n")
    slow.chmod(0o755)
    job = submit({**slurm, "GRPO_PYTHON": str(slow)})
    wait_for(tmp_path, "checking")
    os.kill(job.pid, signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "SIGTERM" in output
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert not (tmp_path / "out").exists()


def test_the_folder_of_the_run_is_no_argument(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit(slurm, out_dir=str(tmp_path / "run"))
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2
    assert output == "error: --out-dir: the run's folder is GRPO_OUT\n"


@pytest.mark.slow
def test_a_folder_that_another_job_writes_to_is_left_alone(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = submit({**slurm, "GRPO_PROCESSES": "1"}, max_steps=2)
        output = job.communicate(timeout=60)[0]
    assert job.returncode == 1 and "another run is writing to it" in output
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_step_to_resume_from_is_obeyed_until_the_job_has_saved_one_of_its_own(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """A relative GRPO_OUT is one of the submit folder."""
    out = tmp_path / "out"
    slurm["GRPO_PROCESSES"] = "1"
    slurm["GRPO_OUT"] = os.path.relpath(out, ROOT)
    for part, (job_id, steps, resumed) in enumerate(
        [(JOB, 4, None), (f"{JOB}1", 3, 3), (f"{JOB}1", 6, 3), (f"{JOB}1", 8, 6)]
    ):
        if part == 3:  # the clock of the first part's node was ahead
            os.utime(out / "slurm" / f"{job_id}.first", (2**32, 2**32))
        options = {"resume": 3} if part else {}
        restarted = {"SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": str(max(0, part - 1))}
        job = submit({**slurm, **restarted}, max_steps=steps, save_every=1, **options)
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 0, output
        assert resumed is None or f"resumed from step {resumed} " in output
        assert json.loads((out / "summary.json").read_text())["step"] == steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR2", "INT"])
def test_a_job_that_is_stopped_and_not_queued_again_has_failed(
    slurm: dict[str, str], tmp_path: Path, name: str
) -> None:
    """As for jobs that wait for its end. INT is how a user's Ctrl-C under srun arrives."""
    out = tmp_path / "out"
    slurm |= {"GRPO_PROCESSES": "1"} | ({"GRPO_NO_REQUEUE": "1"} if name == "USR2" else {})
    if name == "INT":  # it asks to be queued, which fails
        (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\n[ $1 = show ]\n")
    job = submit(slurm, max_steps=100_000)
    wait_for(out, "checkpoints/step_*/manifest.json")
    os.kill(job.pid, getattr(signal, f"SIG{name}"))
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1, output
    step = json.loads((out / "summary.json").read_text())["step"]
    assert weights(out)[0] == step and not (tmp_path / "requeued").exists()
    report = (out / "slurm" / f"{JOB}.0" / "job_summary.txt").read_text()
    assert "exit code   1" in report and f"step        {step}" in report


@pytest.mark.slow
def test_a_part_that_fails_does_not_report_the_end_of_the_one_before(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    slurm["GRPO_PROCESSES"] = "1"
    submit(slurm, max_steps=2).communicate(timeout=120)
    job = submit({**slurm, "SLURM_RESTART_COUNT": "1"}, max_steps=4, seed=9)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1 and "--seed" in output
    report = (tmp_path / "out" / "slurm" / f"{JOB}.1" / "job_summary.txt").read_text()
    assert "status       ()" in report and "exit code   1" in report


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

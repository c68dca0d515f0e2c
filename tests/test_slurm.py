"""slurm/grpo.sbatch, with stand-ins for SLURM: checks, signals, requeueing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minigrpo.run.logging import read_jsonl

from .tiny import ROOT, TINY, flags, read_json, tiny_chess_model, wait_until

SCRIPT = ROOT / "slurm" / "grpo.sbatch"
JOB = str(os.getpid())  # the launcher's port depends on it, and two test runs must not share it
STANDINS = {
    # drops its own options and becomes the process that it starts, so that signals reach it
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": """case $1 in
        requeue) echo "$2" >> "$SLURM_TEST/requeued" ;;
        show) echo 127.0.0.1 ;;
        esac""",
    "nvidia-smi": 'for ((i = 0; i < ${FAKE_GPUS:-0}; i++)); do echo "GPU $i"; done',
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
        "SLURM_SUBMIT_DIR": str(ROOT),
        "GRPO_OUT": str(tmp_path / "out"),
        "GRPO_PYTHON": sys.executable,
        "GRPO_CHECKPOINT_MB": "1",
        "GRPO_PROCESSES": "2",
        "OMP_NUM_THREADS": "1",
    }


def submit(env: dict[str, str], **changes: Any) -> subprocess.Popen[str]:
    settings = {
        **TINY,
        "model": tiny_chess_model(Path(env["SLURM_TEST"]) / "model"),
        "device": "cpu",
        "reward_weights": "similarity=1",
        **changes,
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), "--fsdp", *flags(settings)],
        cwd=ROOT,
        env=env,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_signal_requeues_and_the_next_part_goes_on(slurm: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = submit(slurm, max_steps=100_000)
    wait_until(lambda: len(list(out.glob("checkpoints/step_*"))) > 1 or job.poll() is not None, 120)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    summary = read_json(out / "summary.json")
    assert summary["status"] == "stopped"
    assert summary["exit_reason"] == "SIGUSR1"
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    stop = summary["step"] + 2
    job = submit({**slurm, "SLURM_RESTART_COUNT": "1"}, max_steps=100_000, stop_after=stop)
    output, _ = job.communicate(timeout=120)
    assert read_json(out / "summary.json")["step"] == stop, output
    assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == [*range(1, stop + 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"GRPO_CHECKPOINT_MB": "999999999"},  # no room
        {"GRPO_PYTHON": "/nowhere/python"},
        {"GRPO_OUT": "/dev/null/out"},
        {"SLURM_GPUS_ON_NODE": "2", "FAKE_GPUS": "1", "ARGUMENT": "cuda"},
        {"SLURM_JOB_ID": ""},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_missing_is_told_before_any_work(
    slurm: dict[str, str], changes: dict[str, str], tmp_path: Path
) -> None:
    job = submit({**slurm, **changes}, device=changes.get("ARGUMENT", "cpu"))
    job.communicate(timeout=60)
    assert job.returncode == 2
    assert not (tmp_path / "out" / "checkpoints").exists()

"""The job that a benchmark measures, and the script for a GPU."""

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.cli import main
from benchmarks.work import Work, WorkFlags
from minigrpo.run.logging import read_jsonl


def test_a_job_has_the_sizes_of_its_files_or_preset_and_of_the_flags(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('max_steps = 3\nout_dir = "runs/a"\nprompts_per_step = 4\ngroup_size = 9\n')
    real = Work.of(WorkFlags(config=(str(job),), group_size=3, device="cpu"))
    assert real.config.sampling.prompts_per_step == 4
    assert real.config.sampling.group_size == 3
    assert real.config.run.max_steps == 10**6
    assert real.config.run.out_dir == ""
    assert not real.forced
    made_up = Work.of(WorkFlags(max_new_tokens=5, device="cpu"))
    assert made_up.model.shape.context == 85
    assert made_up.forced
    assert len(made_up.tokenizer.encode(made_up.task.train(0).prompt)) == 80


def test_a_figure_is_made_of_runs_that_are_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/figures/1-steps"
    for _ in range(2):
        figures.main(("default-job",), max_steps=1)
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 6
    assert (folder / "default-job.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_jsonl(folder / "default-job-sft-0/metrics.jsonl")) == 1
    last = read_jsonl(folder / "default-job-grpo-0/eval.jsonl")[-1]
    assert table[3].split(" | ")[1] == f"{100 * last['exact_sampled']:.1f}"
    (folder / "default-job-grpo-0/summary.json").write_text('{"status": "stopped"}')
    monkeypatch.setattr(figures, "run_command", lambda *words: None)
    with pytest.raises(SystemExit):  # all its steps are there, and its evaluation may not be
        figures.main(("default-job",), max_steps=1)


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    main(["gpu", "--dry", "--lines", str(lines)])
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(steps) == 21
    assert not [step for step in steps if {"error", "skipped"} & step.keys()]
    assert steps[-1]["step"] == "tests"
    assert steps[-1]["exit_code"] == 0


@pytest.mark.peer
def test_the_peers_of_a_gpu_take_turns_on_a_cpu(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    main(["peers", "--dry", "--jobs", "gpu-0.5b", "--ways", "float32", "--lines", str(lines)])
    ours, theirs = read_jsonl(lines)
    for row in (ours, theirs):
        assert not row["status"]
        assert row["completion_tokens"] == 64 * 8
        assert 0 < row["rollout"] < float(row["s/step"].split()[0])
        assert row["dtype"] == "float32"

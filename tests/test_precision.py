"""`benchmark.py precision`: smoothing, difference and verdict on made-up curves; runs are reused,
and one that failed is reported.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cli
from benchmarks.precision_curves import FLOOR, Curves, Difference, compare, smooth, smooth_steps
from benchmarks.training_runs import Run
from minigrpo.runtime.settings import toml_lines

STEPS = np.arange(1, 41)
RISING = np.linspace(1, 2, 40)


def test_smoothing_averages_whole_windows_and_names_their_middle() -> None:
    assert smooth(np.array([[1.0, 2, 3, 4], [0, 0, 3, 3]]), 3).tolist() == [[2, 3], [1, 2]]
    assert smooth_steps(np.array([10, 20, 30, 40]), 3).tolist() == [20, 30]
    assert smooth(np.array([1.0, 3]), 9).tolist() == [2]  # shorter than the window


def test_the_difference_is_relative_and_found_where_it_is_largest() -> None:
    float32 = np.stack([RISING - 0.1, RISING + 0.1])
    apart = np.where(STEPS > 20, 0.03, -0.01)
    difference = compare(float32, float32 * (1 + apart), STEPS, 1)[0]
    assert difference.largest == pytest.approx(0.03)
    assert difference.step > 20
    assert difference.mean == pytest.approx(0.01)
    base = RISING[difference.step - 1]
    assert difference.spread == pytest.approx(0.2 / np.sqrt(2) / base)


def test_smoothing_removes_noise_but_not_a_bias() -> None:
    rng = np.random.default_rng(0)
    float32 = RISING + 0.2 * rng.standard_normal((3, 40))
    noisy = RISING + 0.2 * rng.standard_normal((3, 40))
    assert compare(float32, noisy, STEPS, 1)[0].largest > 0.1
    assert compare(float32, noisy, STEPS, 30)[0].largest < 0.05
    assert compare(float32, 1.2 * noisy, STEPS, 30)[0].largest > 0.15


def test_where_a_curve_is_close_to_zero_the_difference_is_relative_to_a_share_of_its_peak() -> None:
    float32 = np.array([[0.0, 1.0]])
    difference = compare(float32, float32 + 0.01, STEPS[:2], 1)[0]
    assert difference.largest == pytest.approx(0.01 / FLOOR)
    assert compare(0 * float32, 0 * float32, STEPS[:2], 1)[0].largest == 0


@pytest.mark.parametrize(
    ("largest", "spread", "passed", "verdict"),
    [
        (0.02, 0.03, True, "below 5 %, below the spread of seeds"),
        (0.04, 0.03, True, "below 5 %, above the spread of seeds"),
        (0.07, 0.09, False, "undecided: above 5 %, but below the spread of seeds"),
        (0.07, 0.01, False, "fails: above 5 %, above the spread of seeds"),
        (0.02, None, True, "below 5 %, the spread of seeds is unknown"),
        (0.07, None, False, "fails: above 5 %, the spread of seeds is unknown"),
        (float("nan"), 0.01, False, "fails: the curve is not finite"),
    ],
)
def test_the_verdict(largest: float, spread: float | None, passed: bool, verdict: str) -> None:
    difference = Difference(largest, step=1, spread=spread, mean=0.0, mean_spread=spread)
    assert difference.passed == passed
    assert difference.verdict.startswith(verdict)


def test_a_value_that_is_not_finite_fails_and_is_valid_json() -> None:
    broken = np.array([[1.0, np.nan, 1.0]])
    by_precision = {"float32": np.ones((1, 3)), "bfloat16": broken}
    curves = Curves("nll", "loss", "loss", STEPS[:3], 1, "steps", by_precision)
    (record,) = curves.records()
    assert record["largest"] is None and not record["passed"]
    text = json.dumps([record, curves.to_dict()])
    assert json.loads(text, parse_constant=pytest.fail)[1]["smoothed"]["bfloat16"] == [[1, None, 1]]


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs write made-up logs instead of training: bfloat16 is 2 % above float32."""
    names: list[str] = []

    def start(run: Run, threads: int) -> None:
        names.append(run.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, Any] = {"config.toml": toml_lines(run.config, ("out_dir", "resume"))}
        value = (1 + 0.1 * run.seed) * (1.02 if run.config.speed.use_amp else 1)
        last = run.config.run.max_steps
        evaluation = {"exact": value, "exact_sampled": value}
        files["metrics.jsonl"] = [
            json.dumps({"step": step + 1, "loss": value, "reward": value}) for step in range(last)
        ]
        files["eval.jsonl"] = [json.dumps({"step": step, **evaluation}) for step in range(last + 1)]
        files["summary.json"] = [json.dumps({"status": "finished"})]
        files["output.txt"] = ["error: step 3: the loss is not finite"]
        for name, lines in files.items():
            (run.folder / name).write_text("\n".join(lines) + "\n")
        failed = run.name == "grpo-bfloat16-1"
        if failed:
            (run.folder / "summary.json").unlink()
        run.process = Ended(int(failed))  # type: ignore[assignment]

    monkeypatch.setattr(Run, "start", start)
    monkeypatch.setattr("benchmarks.training_runs.SECONDS_BETWEEN_LOOKS", 0)
    return names


def precision(folder: Path, *words: str) -> dict[str, Any]:
    flags = ["--steps", "4", "--seeds", "2", "--out-dir", str(folder), *words]
    cli.main(["precision", *flags])
    return json.loads((folder / "precision.json").read_text())


def test_finished_runs_are_reused_and_failed_ones_are_named(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = precision(tmp_path, "--jobs", "2")
    assert len(started) == 2 * 2 * 2
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {"nll: loss", "grpo: reward", "grpo: exact_sampled", "grpo: exact"}
    assert all(row["largest"] == pytest.approx(0.02) for row in rows.values())
    assert rows["nll: loss"]["seeds"] == 2 and rows["grpo: exact"]["seeds"] == 1
    assert rows["nll: loss"]["spread"] == pytest.approx(0.1 / np.sqrt(2) / 1.05)
    failure = "grpo-bfloat16-1 failed: step 3: the loss is not finite"
    assert failure in result["verdict"] and failure in capsys.readouterr().out
    assert (tmp_path / "precision.png").exists()

    started.clear()
    precision(tmp_path)
    assert started == ["grpo-bfloat16-1"]
    with pytest.raises(SystemExit) as stop:
        precision(tmp_path, "--steps", "5")
    assert stop.value.code == 2
    assert "with other settings (--max-steps was 4, is 5)" in capsys.readouterr().err
    assert started == ["grpo-bfloat16-1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--figure", "curves.txt"], "--figure must end with .png, .svg, .pdf"),
        (["--config", "nowhere"], "--config nowhere: no such file or preset"),
    ],
)
def test_bad_input_is_found_before_any_run(
    words: list[str],
    said: str,
    tmp_path: Path,
    started: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        precision(tmp_path, *words)
    assert stop.value.code == 2 and not started
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_real_runs_of_two_steps(tmp_path: Path) -> None:
    """Float32 and bfloat16 train through the whole command, and start from the same weights."""
    words = ["--steps", "2", "--seeds", "1", "--jobs", "2", "--eval-size", "2"]
    cli.main(["precision", *words, "--out-dir", str(tmp_path)])
    result = json.loads((tmp_path / "precision.json").read_text())
    assert result["failed"] == {}
    assert {row["name"] for row in result["rows"]} > {"nll: loss", "grpo: reward"}
    assert all(row["passed"] for row in result["rows"] if row["name"] == "nll: loss")
    first = [
        json.loads((tmp_path / f"nll-{name}-0" / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("float32", "bfloat16")
    ]
    assert first[0]["loss"] != first[1]["loss"] == pytest.approx(first[0]["loss"], rel=1e-2)

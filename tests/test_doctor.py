"""Each rule is triggered by a made-up run that triggers it alone; a healthy run triggers none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo import Config
from minigrpo.tools import doctor
from minigrpo.tools.diagnosis import FEWEST_STEPS, NOTES, RULES, diagnose
from minigrpo.tools.run_data import RunData, read_run

from .test_misuse_tools import refused
from .test_reliability import CHEAP, make

STEPS = 100
Metrics = dict[str, np.ndarray]


def between(start: float, end: float) -> np.ndarray:
    """A value that moves in a line, with noise of 3 % that is the same in each test."""
    return np.linspace(start, end, STEPS) * (1 + 0.03 * np.random.default_rng(0).normal(size=STEPS))


HEALTHY: Metrics = {
    "reward": between(0.5, 0.8),
    "rewards/exact/mean": between(0.3, 0.6),
    "rewards/similarity/mean": between(0.8, 0.9),
    "frac_reward_zero_std": between(0.05, 0.3),
    "completions/clipped_ratio": between(0.0, 0.01),
    "completions/mean_length": between(50, 52),
    "entropy": between(0.5, 0.4),
    "kl": between(0.001, 0.03),
    "clip_ratio/low_mean": between(0.01, 0.02),
    "clip_ratio/high_mean": between(0.01, 0.02),
    "grad_norm": between(0.8, 1.2),
    "sampling/logp_difference_mean": between(1e-7, 1e-7),
    "skipped_steps": np.zeros(STEPS),
    "loss": between(0.1, 0.1),
    "step_time": between(1.0, 1.0),
    "time/reward": between(0.1, 0.1),
    "time/data": between(0.01, 0.01),
    "memory/peak_mib": between(900, 1000),
}
EVALUATED = [(0, 0.3), (50, 0.4), (100, 0.5)]


def made_up(
    metrics: Metrics, evaluated: list[tuple[int, float]] = EVALUATED, **settings: Any
) -> RunData:
    steps = len(next(iter(metrics.values())))
    records = [
        {"step": step + 1, **{name: float(values[step]) for name, values in metrics.items()}}
        for step in range(steps)
    ]
    evaluations = [{"step": step, "n": 1000, "exact_sampled": x} for step, x in evaluated]
    flat = Config.of(**settings).flat()
    return RunData("made-up", flat, records, evaluations, {}, memory_limit_mib=10_000)


def changed(**changes: Any) -> RunData:
    """The healthy run with other metrics, evaluations or settings."""
    evaluated = changes.pop("evaluated", EVALUATED)
    settings = changes.pop("settings", {})
    return made_up({**HEALTHY, **changes.pop("metrics")}, evaluated, **settings)


failing = np.zeros(STEPS)
failing[40:] = 2
skipping = np.zeros(STEPS)
skipping[70:] = 1
ONLY: dict[str, dict[str, Any]] = {
    "no signal": {"metrics": {"frac_reward_zero_std": between(0.3, 0.95)}},
    "saturated": {
        "metrics": {
            "rewards/exact/mean": np.full(STEPS, 0.99),
            "rewards/similarity/mean": np.ones(STEPS),
            "frac_reward_zero_std": between(0.3, 0.95),
        }
    },
    "silent part": {"metrics": {"rewards/check/mean": np.zeros(STEPS)}},
    "dominated": {
        "metrics": {
            "rewards/format/mean": np.ones(STEPS),
            "rewards/exact/mean": np.full(STEPS, 0.02),
        }
    },
    "reward failures": {"metrics": {"rewards/exact/failures": failing}},
    "cut": {"metrics": {"completions/clipped_ratio": between(0.1, 0.5)}},
    "length grows": {"metrics": {"completions/mean_length": between(50, 120)}},
    "length collapses": {"metrics": {"completions/mean_length": between(50, 5)}},
    "entropy collapses": {"metrics": {"entropy": between(0.5, 0.01)}},
    "entropy explodes": {"metrics": {"entropy": between(0.5, 3)}},
    "KL runs away": {"metrics": {"kl": np.geomspace(0.001, 5, STEPS)}},
    "clip ratio": {"metrics": {"clip_ratio/high_mean": between(0.1, 0.6)}},
    "gradient clipped": {"metrics": {"grad_norm": between(20, 30)}},
    "sampler gap": {"metrics": {"sampling/logp_difference_mean": between(0.01, 0.01)}},
    "falls": {"metrics": {}, "evaluated": [(0, 0.3), (50, 0.5), (100, 0.35)]},
    "no movement": {
        "metrics": {"reward": between(0.5, 0.5)},
        "evaluated": [(0, 0.3), (50, 0.31), (100, 0.302)],
    },
    "overfits": {"metrics": {}, "evaluated": [(0, 0.4), (100, 0.3)]},
    "skipped steps": {"metrics": {"skipped_steps": skipping}},
    "slow phase": {"metrics": {"time/reward": between(0.5, 0.5)}},
    "memory": {"metrics": {"memory/peak_mib": between(9500, 9700)}},
}


def test_a_healthy_run_triggers_no_rule() -> None:
    assert diagnose(made_up(HEALTHY)) == []
    assert diagnose(made_up(HEALTHY), NOTES) == []


def test_every_rule_has_a_case_and_says_why_it_has_its_threshold() -> None:
    assert set(ONLY) == set(RULES)
    assert all(len(rule.source) > 5 for rule in (RULES | NOTES).values())


@pytest.mark.parametrize("name", ONLY)
def test_a_rule_finds_its_own_fault_and_no_other_rule_does(name: str) -> None:
    (finding,) = diagnose(changed(**ONLY[name]))
    assert finding.rule == name
    assert finding.what.endswith(".") and finding.advice.endswith(".")
    assert any(character.isdigit() for character in finding.evidence)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.trend])
def test_a_run_of_a_few_steps_is_not_judged_by_its_trend(name: str) -> None:
    run = changed(**ONLY[name])
    assert diagnose(replace(run, metrics=run.metrics[: FEWEST_STEPS - 1])) == []


@pytest.mark.parametrize(
    ("reward", "dead", "rule"),
    [(0.0, 1.0, "no signal"), (0.4, 1.0, "no signal"), (1.0, 1.0, "saturated"), (0.4, 0.9, None)],
)
def test_a_short_run_without_any_signal_is_told_so(
    reward: float, dead: float, rule: str | None
) -> None:
    few = np.full(3, reward)
    metrics = {"reward": few, "rewards/exact/mean": few, "frac_reward_zero_std": np.full(3, dead)}
    found = diagnose(made_up(metrics, evaluated=[]))
    assert [finding.rule for finding in found] == ([rule] if rule else [])
    if rule:
        assert "steps 1 to 3" in found[0].evidence
        assert ("every reward is 0" in found[0].evidence) == (reward == 0)


@pytest.mark.parametrize("odd", [{"n": "x"}, {"n": -5}, {"exact_sampled": 7.0}, {"n": None}])
def test_an_evaluation_that_is_no_share_is_left_out(odd: dict[str, Any]) -> None:
    run = made_up(HEALTHY)
    run.evaluations[1].update(odd)
    assert diagnose(run) == []


def test_all_texts_cut_off_is_another_fault_than_some() -> None:
    (finding,) = diagnose(changed(metrics={"completions/clipped_ratio": np.ones(STEPS)}))
    assert "does not write its end-of-text token" in finding.what


def test_metrics_that_are_missing_or_null_trigger_nothing() -> None:
    """As in a supervised run, an older version's, or one whose losses are not finite."""
    records = [{"step": step, "loss": None, "grad_norm": None} for step in range(1, STEPS + 1)]
    for settings in ({}, {"loss": "nll"}):
        assert diagnose(RunData("bare", Config.of(**settings).flat(), records)) == []


def test_a_loss_of_zero_is_explained() -> None:
    run = changed(metrics={"loss": np.full(STEPS, 1e-7)})
    assert diagnose(run) == []
    (note,) = diagnose(run, NOTES)
    assert "that is right" in note.what
    several = changed(metrics={"loss": np.full(STEPS, 1e-7)}, settings={"num_iterations": 2})
    assert diagnose(several, NOTES) == []


# --- the command ----------------------------------------------------------------------------------


def test_the_doctor_reads_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run", max_steps=3).fit()
    capsys.readouterr()
    doctor.main([str(tmp_path / "run")])
    assert "in 3 steps; trends are judged from 20 steps" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    assert len(run.metrics) == 3 and run.settings["data"] == CHEAP["data"]


def only_metrics(run: Path) -> None:
    for name in ("config.toml", "eval.jsonl", "summary.json"):
        (run / name).unlink(missing_ok=True)


def half_a_line(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')


def no_evaluation_yet(run: Path) -> None:
    (run / "eval.jsonl").write_text("")


@pytest.mark.parametrize("change", [only_metrics, half_a_line, no_evaluation_yet])
def test_a_run_that_is_going_or_incomplete_is_read(
    tmp_path: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "n": 3, "exact_sampled": 0.5}\n')
    change(tmp_path)
    doctor.main([str(tmp_path)])
    assert "rules find nothing wrong in 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no metrics.jsonl in this folder, so it is no run"),
        ("", "metrics.jsonl: has no records"),
        ("[1]\n", "metrics.jsonl, line 1: must be a JSON object"),
        (json.dumps({"step": 1}) + "\nx\n{}\n", "metrics.jsonl, line 2: is not JSON"),
    ],
)
def test_what_is_no_run_is_one_line(
    tmp_path: Path, content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert words in refused(capsys, doctor, tmp_path)
    assert "no such folder" in refused(capsys, doctor, tmp_path / "nowhere")
    assert "at least one run" in refused(capsys, doctor)

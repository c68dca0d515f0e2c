"""Each rule is triggered by a made-up run that triggers it alone; healthy runs trigger none."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.tools.doctor import FEWEST_STEPS, RULES, diagnose
from minigrpo.tools.runs import Run

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
    "entropy": between(0.5, 0.4),
    "kl": between(0.001, 0.03),
    "clip_ratio/low_mean": between(0.01, 0.02),
    "clip_ratio/high_mean": between(0.01, 0.02),
    "sampling/logp_difference_mean": between(1e-7, 1e-7),
    "skipped_steps": np.zeros(STEPS),
    "loss": between(0.1, 0.1),
}
Evaluated = list[tuple[int, float]]
EVALUATED = [(0, 0.3), (50, 0.4), (100, 0.5)]


def made_up(metrics: Metrics, evaluated: Evaluated = EVALUATED, **settings: Any) -> Run:
    steps = len(next(iter(metrics.values())))
    records = [
        {"step": step + 1, **{name: float(values[step]) for name, values in metrics.items()}}
        for step in range(steps)
    ]
    evaluations = [{"step": step, "n": 1000, "exact_sampled": x} for step, x in evaluated]
    return Run(Path("run"), Config.of(**settings), records, evaluations)


def found_in(run: Run) -> list[str]:
    return [rule.name for rule, _ in diagnose(run)]


rare = np.zeros(STEPS)
rare[70:] = 2
ONLY: dict[str, Metrics] = {
    "no signal": {"frac_reward_zero_std": between(0.3, 0.95)},
    "silent reward": {"rewards/check/mean": np.zeros(STEPS)},
    "failing reward": {"rewards/exact/failures": rare},
    "cut off": {"completions/clipped_ratio": between(0.1, 0.5)},
    "flat reward": {"reward": between(0.5, 0.5)},
    "entropy collapse": {"entropy": between(0.5, 0.01)},
    "entropy explosion": {"entropy": between(0.5, 3)},
    "KL runs away": {"kl": np.geomspace(0.001, 5, STEPS)},
    "clipped ratios": {"clip_ratio/high_mean": between(0.1, 0.6)},
    "sampler gap": {"sampling/logp_difference_mean": between(0.01, 0.01)},
    "skipped steps": {"skipped_steps": rare},
    "falls": {},
}
FALLING = [(0, 0.3), (50, 0.5), (100, 0.35)]


def faulty(name: str) -> Run:
    return made_up(HEALTHY | ONLY[name], FALLING if name == "falls" else EVALUATED)


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == set(ONLY)


@pytest.mark.parametrize("name", ONLY)
def test_a_rule_finds_its_own_fault_and_no_other_rule_does(name: str) -> None:
    assert found_in(faulty(name)) == [name]
    ((rule, numbers),) = diagnose(faulty(name))
    assert any(character.isdigit() for character in numbers)
    assert rule.advice


def test_a_run_of_a_few_steps_is_not_judged_by_its_trend() -> None:
    for name in (rule.name for rule in RULES if rule.fewest == FEWEST_STEPS):
        run = faulty(name)
        short = replace(run, metrics=run.metrics[: FEWEST_STEPS - 1], evaluations=())
        assert found_in(short) == []


@pytest.mark.parametrize(("dead", "rules"), [(1.0, ["no signal"]), (0.4, [])])
def test_a_short_run_without_any_signal_is_told_so(dead: float, rules: list[str]) -> None:
    assert found_in(made_up({"frac_reward_zero_std": np.full(3, dead)}, [])) == rules


@pytest.mark.parametrize("settings", [{}, {"loss": "nll"}])
def test_metrics_that_are_missing_trigger_nothing(settings: dict[str, Any]) -> None:
    """As in a supervised run, or one whose losses are not finite."""
    records = [{"step": step} for step in range(1, STEPS + 1)]
    assert diagnose(Run(Path("bare"), Config.of(**settings), records)) == []


def test_a_kl_may_teach_alone() -> None:
    dead = {"reward": np.zeros(STEPS), "frac_reward_zero_std": np.ones(STEPS)}
    assert found_in(made_up(dead, [])) == ["no signal"]
    assert found_in(made_up(dead, [], kl_coef=0.1)) == []


def test_entropy_may_collapse_in_supervised_fine_tuning() -> None:
    assert found_in(made_up({"entropy": between(0.5, 0.01)}, [], loss="nll")) == []


@pytest.mark.parametrize("odd", [{"n": 0}, {"exact_sampled": 7.0}])
def test_an_evaluation_that_is_no_share_is_not_judged(odd: dict[str, float]) -> None:
    run = faulty("falls")
    odd_one = {**run.evaluations[1], **odd}
    changed = replace(run, evaluations=[run.evaluations[0], odd_one, run.evaluations[2]])
    assert found_in(changed) == []


# --- how often chance alone finds something -------------------------------------------------------


def chance(rng: np.random.Generator, shares: list[float], reward: tuple[float, float]) -> Run:
    """A run as noisy as one of 64 completions per step and 512 examples per evaluation."""
    steps = 200

    def noisy(start: float, end: float, share: float) -> np.ndarray:
        return np.linspace(start, end, steps) * (1 + share * rng.normal(size=steps))

    metrics = {
        "reward": noisy(*reward, 0.2),
        "rewards/exact/mean": rng.binomial(64, np.linspace(*reward, steps)) / 64,
        "frac_reward_zero_std": rng.binomial(8, 0.4, size=steps) / 8,
        "completions/clipped_ratio": rng.binomial(64, 0.05, size=steps) / 64,
        "entropy": noisy(0.5, 0.25, 0.3),
        "kl": noisy(0.001, 0.04, 0.5),
        "clip_ratio/low_mean": rng.binomial(1000, 0.05, size=steps) / 1000,
        "sampling/logp_difference_mean": noisy(1e-6, 1e-6, 0.5),
    }
    run = made_up(metrics, [], num_iterations=2)
    evaluations = [
        {"step": 50 * i, "n": 512, "exact_sampled": rng.binomial(512, share) / 512}
        for i, share in enumerate(shares)
    ]
    return replace(run, evaluations=evaluations)


def test_false_alarms_are_rare_in_healthy_runs() -> None:
    rng = np.random.default_rng(0)
    shares = [0.30, 0.38, 0.44, 0.48, 0.50]
    runs = [chance(rng, shares, (0.3, 0.5)) for _ in range(100)]
    alarms = Counter(name for run in runs for name in found_in(run))
    assert sum(alarms.values()) <= 1, alarms

"""Each rule is triggered by a made-up run that triggers it alone; healthy runs trigger none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.run.logging import Run
from minigrpo.tools.doctor import FEWEST_STEPS, RULES, diagnose

STEPS = 100


def between(start: float, end: float) -> np.ndarray:
    """A value that moves in a line, with noise of 3 % that is the same in each test."""
    noise = np.random.default_rng(0).normal(size=STEPS)
    return np.linspace(start, end, STEPS) * (1 + 0.03 * noise)


HEALTHY = {
    "reward": between(0.5, 0.8),
    "rewards/exact/mean": between(0.3, 0.6),
    "rewards/similarity/mean": between(0.8, 0.9),
    "frac_reward_zero_std": between(0.05, 0.3),
    "completions/clipped_ratio": between(0.0, 0.01),
    "entropy": between(0.5, 0.4),
    "sampling/logp_difference_mean": between(1e-7, 1e-7),
    "loss": between(0.1, 0.1),
}
EVALUATED = [(0, 0.3), (50, 0.4), (100, 0.5)]
FALLING = [(0, 0.3), (50, 0.5), (100, 0.35)]
DESTROYED = [(0, 0.3), (50, 0.35), (100, 0.05)]


def made_up(metrics: Any, evaluated: Any = EVALUATED, **settings: Any) -> Run:
    rows = zip(*metrics.values(), strict=True)
    records = [
        {"step": step, **dict(zip(metrics, map(float, row), strict=True))}
        for step, row in enumerate(rows, 1)
    ]
    evaluations = [{"step": step, "n": 1000, "exact_sampled": x} for step, x in evaluated]
    return Run(Path("run"), Config.of(**settings), records, evaluations, {})


def found_in(run: Run) -> list[str]:
    """The series in which the doctor finds something."""
    return [rule.series for rule, _ in diagnose(run)]


rare = np.zeros(STEPS)
rare[70:] = 2
FAULTS = [  # of each rule in turn
    {"rewards/exact/failures": rare},
    {},
    {"rewards/exact/mean": between(0.6, 0.1)},
    {"rewards/check/mean": np.zeros(STEPS)},
    {"entropy": between(0.5, 0.01), "reward": between(-0.54, -0.5)},
    {"frac_reward_zero_std": between(0.3, 0.95)},
    {"reward": between(0.5, 0.5)},
    {"tools/call_frequency": np.zeros(STEPS)},
    {"completions/clipped_ratio": between(0.1, 0.5)},
    {"entropy": between(0.5, 3)},
    {"sampling/logp_difference_mean": between(0.01, 0.01)},
    {},
]
FALLS = {1: DESTROYED, len(RULES) - 1: FALLING}  # the evaluations of rules on these
FAULTY = [
    made_up(HEALTHY | fault, FALLS.get(number, EVALUATED)) for number, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_rule_finds_its_own_fault_and_no_other_rule_does(number: int) -> None:
    ((rule, numbers),) = diagnose(FAULTY[number])
    assert rule is RULES[number] and rule.advice
    assert any(character.isdigit() for character in numbers)


def test_what_is_short_missing_or_expected_is_no_finding() -> None:
    long_rules = [number for number, rule in enumerate(RULES) if rule.fewest >= FEWEST_STEPS]
    assert long_rules
    for number in long_rules:
        run = FAULTY[number]
        short = replace(run, metrics=run.metrics[: FEWEST_STEPS - 1])
        assert found_in(short) == []
    at_once = np.minimum(np.arange(STEPS) / 10, 1)
    learnt = {"reward": 0.1 + 0.5 * at_once, "entropy": 2 - 1.7 * at_once}
    assert found_in(made_up(learnt, [])) == []
    dead = "frac_reward_zero_std"
    assert found_in(made_up({dead: np.full(3, 1.0)}, [])) == [dead]  # whatever the length
    assert found_in(made_up({dead: np.full(3, 0.4)}, [])) == []
    assert found_in(made_up({"loss": np.zeros(STEPS)}, [])) == []
    assert found_in(made_up({"entropy": between(0.5, 0.01)}, [], loss="nll")) == []

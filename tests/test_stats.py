"""What is measured, against the same figures worked out by hand or by definition."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.metrics import rollout_metrics
from minigrpo.runtime import statistics as stats
from minigrpo.runtime.distributed import DistContext
from minigrpo.types import Completions, Example, RewardTable, RolloutBatch

EOS = 9


def test_rollout_metrics_by_hand() -> None:
    """Two prompts of 3 and 1 tokens; completions of 2, 1, 3 and 3 tokens, one of them cut off."""
    ids = torch.tensor([[[1, EOS, 0], [EOS, 0, 0]], [[1, 2, EOS], [1, 2, 3]]])
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]).bool()
    kept = torch.full((2, 2, 3), 0.75).log()
    kept[1, 1] = 0.0  # all of the mass
    kept[0, 1, 1:] = torch.nan  # padding
    total = np.array([[1.0, 3.0], [2.0, 2.0]])
    parts = {"one": total / 2, "rare": np.array([[np.nan] * 2, [1.0, 0.0]])}
    prompts, lengths = torch.tensor([[1, 2, 3], [1, 0, 0]]), torch.tensor([3, 1])
    batch = RolloutBatch(
        examples=[Example("abc"), Example("a")],
        completions=Completions(prompts, lengths, ids, mask, log_kept_mass=kept),
        texts=[["a", ""], ["ab", "abc"]],
        rewards=RewardTable(total, parts, {"one": 3}),
        metrics={"rollout/rounds": 7.0},
    )
    expected = {
        "reward": 2.0,
        "reward_std": 2**0.5 / 2,  # of 1 and 3 with n - 1, and of two equal ones
        "frac_reward_zero_std": 0.5,
        "rewards/one/mean": 1.0,
        "rewards/rare/mean": 0.5,
        "rewards/one/failures": 3.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_length": 9 / 4,
        "sampling/removed_mass": 0.25 * 6 / 9,
        "rollout/rounds": 7.0,
    }
    assert DistContext().combine(rollout_metrics(batch, [EOS])) == pytest.approx(expected)


def test_wilson_and_students_t_have_published_values() -> None:
    for share, n, *ends in ((0.5, 10, 0.2366, 0.7634), (0, 20, 0, 0.1611), (1, 20, 0.8389, 1)):
        found = stats.wilson(share, n)
        assert [found.low, found.high] == pytest.approx(ends, abs=1e-4)
    for n, t in ((3, 4.303), (4, 3.182), (6, 2.571), (30, 2.045)):
        values = np.random.default_rng(0).normal(size=n)
        half = t * values.std(ddof=1) / math.sqrt(n)
        ends = (values.mean() - half, values.mean() + half)
        assert stats.students_t(values)[1:] == pytest.approx(ends, abs=0.01 * half)


DRAWS = {
    "shares": lambda rng: ((rng.random((60, 1)) < 0.3).astype(float), 0.3),
    "means of several": lambda rng: (rng.beta(0.5, 0.5, (60, 1)) * np.ones(4), 0.5),
    "skewed": lambda rng: (rng.exponential(2.0, (100, 1)), 2.0),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_intervals_hold_the_truth_nineteen_times_out_of_twenty(kind: str) -> None:
    """The K values of one example are not independent: four equal ones are one."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        values, truth = DRAWS[kind](rng)
        found = stats.estimate(stats.means(values))
        held += found.low <= truth <= found.high
    assert 0.90 < held / 300 < 0.98


def test_an_estimate_leaves_out_what_is_not_known() -> None:
    found = stats.estimate(stats.means(np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, 4.0]])))
    assert found == stats.estimate(np.array([1.0, 3.0])) and found.value == 2.0
    assert math.isnan(stats.estimate(np.full(2, np.nan)).value)
    assert str(stats.estimate(np.array([0.25]))) == "0.250"
    assert math.isnan(stats.students_t(np.ones(1)).low)


def test_pass_at_k_is_the_share_of_samples_of_k_with_a_right_one() -> None:
    for n, k in itertools.product(range(1, 7), range(1, 7)):
        for right in range(n + 1):
            if k <= n:
                draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
                expected = sum(map(any, draws)) / len(draws)
                assert stats.pass_at_k(n, right, k) == pytest.approx(expected)
    for n, right, k in ((4, 5, 1), (4, 2, -1), (4, 2, 5)):
        with pytest.raises((ValueError, ZeroDivisionError)):
            stats.pass_at_k(n, right, k)
    # of powers of two and of all samples
    right = np.array([[1, 0, 0, 0, 0, 0], [0] * 6, [np.nan] * 6])
    found = stats.passes(right)
    assert [*found] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert found["pass@1"].value == pytest.approx(1 / 12) and found["pass@6"].value == 0.5
    assert stats.passes(right[:, :1]) == {}


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_is_the_two_sided_sign_test(lost: int, won: int) -> None:
    heads = np.array([math.comb(lost + won, k) for k in range(lost + won + 1)])
    as_odd = abs(np.arange(lost + won + 1) - (lost + won) / 2) >= abs(lost - won) / 2
    expected = heads[as_odd].sum() / heads.sum()
    assert stats.mcnemar(lost, won) == pytest.approx(min(1.0, expected)) == stats.mcnemar(won, lost)


@given(st.lists(st.tuples(st.integers(0, 10).map(lambda k: k / 10), st.integers(0, 1)), min_size=1))
def test_each_measure_of_calibration_is_its_formula(answers: list[tuple[float, int]]) -> None:
    confidence, correct = (list(column) for column in zip(*answers, strict=True))
    n, found = len(answers), stats.calibration(confidence, correct)
    assert found["brier"] == pytest.approx(sum((q - c) ** 2 for q, c in answers) / n)
    bins = {}
    for q, c in answers:
        bins.setdefault(min(round(q * 10), 9), []).append((q, c))
    gaps = (abs(sum(q for q, _ in one) - sum(c for _, c in one)) for one in bins.values())
    assert found["ece"] == pytest.approx(sum(gaps) / n)
    pairs = [(q, p) for (q, c), (p, d) in itertools.product(answers, answers) if c > d]
    wins = sum((q > p) + (q == p) / 2 for q, p in pairs)
    assert found.get("auroc") == (pytest.approx(wins / len(pairs)) if pairs else None)


def test_an_edge_of_calibration_belongs_to_the_bin_above_and_other_values_are_refused() -> None:
    edges = np.arange(11, dtype=np.float32) / np.float32(10)
    # one answer per bin, but for the last, which has two: all gaps have the same sign
    assert stats.calibration(edges, np.zeros(11))["ece"] == pytest.approx(0.5)
    mixed = stats.calibration(np.float32([0.7, 0.75]), [1, 0])  # one bin: gaps of -0.3 and 0.75
    assert mixed["ece"] == pytest.approx(0.225)
    others = [([], []), ([0.5], [1, 0]), ([1.5], [1]), ([math.nan], [1]), ([0.5], [0.5])]
    for confidence, correct in others:
        with pytest.raises(ValueError):
            stats.calibration(confidence, correct)

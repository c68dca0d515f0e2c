"""What is measured, against the same figures worked out by hand or by definition."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo import statistics as stats
from minigrpo.metrics import rollout_metrics
from minigrpo.runtime.distributed import DistContext
from minigrpo.types import Completions, Example, RewardTable, RolloutBatch, Scores

from .steps import group
from .tiny import partly_known


def test_rollout_metrics_by_hand() -> None:
    """Two prompts of 3 and 1 tokens; completions of 2, 1, 3 and 3 tokens, one of them cut off."""
    ids = torch.tensor([[[1, 9, 0], [9, 0, 0]], [[1, 2, 9], [1, 2, 3]]])
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]).bool()
    ended = torch.tensor([[True, True], [True, False]])
    kept = torch.full((2, 2, 3), 0.75).log()
    kept[1, 1] = 0.0  # all of the mass
    kept[0, 1, 1:] = torch.nan  # padding
    total = np.array([[1.0, 3.0], [2.0, 2.0]])
    rare = partly_known([[None, None], [1.0, 0.0]])
    scores = {
        "one": Scores(total / 2, total > 0, failed=total > 1),
        "rare": Scores(rare.values, rare.known, failed=total < 0),
    }
    prompts, lengths = torch.tensor([[1, 2, 3], [1, 0, 0]]), torch.tensor([3, 1])
    batch = RolloutBatch(
        examples=[Example("abc"), Example("a")],
        completions=Completions(prompts, lengths, ids, mask, log_kept_mass=kept, ended=ended),
        texts=[group("a", ""), group("ab", "abc")],
        rewards=RewardTable(total, total > 0, scores),
        metrics={"rollout/rounds": 7.0},
    )
    expected = {
        "reward": 2.0,
        "reward_std": 2**0.5 / 2,  # of 1 and 3 with n - 1, and of two equal ones
        "frac_reward_zero_std": 0.5,
        "rewards/one/mean": 1.0,
        "rewards/rare/mean": 0.5,
        "rewards/one/failures": 3.0,
        "rewards/rare/failures": 0.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_length": 9 / 4,
        "sampling/removed_mass": 0.25 * 6 / 9,
        "rollout/rounds": 7.0,
    }
    assert DistContext().combine(rollout_metrics(batch)) == pytest.approx(expected)


def test_wilsons_interval_has_published_values() -> None:
    for share, n, low, high in ((0.5, 10, 0.2366, 0.7634), (0, 20, 0, 0.1611)):
        found = stats.wilson(share, n)
        assert found.low == pytest.approx(low, abs=1e-4)
        assert found.high == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(("n", "quantile"), [(3, 4.303), (6, 2.571), (30, 2.045)])
def test_students_t_has_published_values(n: int, quantile: float) -> None:
    values = np.random.default_rng(0).normal(size=n)
    expected = quantile * values.std(ddof=1) / math.sqrt(n)
    mean, low, high = stats.students_t(values)
    assert mean - low == pytest.approx(expected, rel=0.01)
    assert high - mean == pytest.approx(expected, rel=0.01)


def test_an_estimate_leaves_out_what_is_not_known() -> None:
    found = stats.means(partly_known([[1.0, None], [None, None], [2.0, 4.0]]))
    assert (found.values.tolist(), found.known.tolist()) == ([1, 0, 3], [True, False, True])
    assert math.isnan(stats.estimate(np.array([])).value)
    assert str(stats.estimate(np.array([2.5]))) == "2.500"
    shares, others = np.full(4, 0.25), np.arange(4)
    assert stats.estimate(shares) == stats.wilson(0.25, 4)
    assert stats.estimate(others) == stats.students_t(others)
    assert stats.students_t(np.ones(1)) == (1, -math.inf, math.inf)


@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_samples_of_k_with_a_right_one(k: int) -> None:
    for right in range(6):
        draws = list(itertools.combinations([1] * right + [0] * (5 - right), k))
        expected = sum(map(any, draws)) / len(draws)
        assert stats.pass_at_k(5, right, k) == pytest.approx(expected)


def test_passes_are_of_powers_of_two_and_of_all_samples() -> None:
    right = [[1, 0, 0, 0, 0, 0], [0] * 6, [*[1] * 5, None]]
    found = stats.passes(partly_known(right))
    assert [*found] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert found["pass@1"].value == pytest.approx(1 / 12)
    assert found["pass@6"].value == 0.5
    assert stats.passes(partly_known([[1], [0]])) == {}  # a single sample
    assert stats.passes(partly_known(right[2:])) == {}  # none that is known


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_is_the_two_sided_sign_test(lost: int, won: int) -> None:
    n = lost + won
    ways = np.array([math.comb(n, heads) for heads in range(n + 1)])
    distance = abs(np.arange(n + 1) - n / 2)
    as_odd = distance >= abs(lost - won) / 2
    assert stats.mcnemar(lost, won) == pytest.approx(ways[as_odd].sum() / 2**n)


CONFIDENCES = st.integers(0, 10).map(lambda tenths: tenths / 10)


@given(st.lists(st.tuples(CONFIDENCES, st.integers(0, 1)), min_size=1))
def test_each_measure_of_calibration_is_its_formula(answers: list[tuple[float, int]]) -> None:
    confidences, outcomes = zip(*answers, strict=True)
    n = len(answers)
    found = stats.calibration(confidences, outcomes)
    assert found["brier"] == pytest.approx(sum((q - c) ** 2 for q, c in answers) / n)
    gaps = Counter()
    for q, c in answers:
        gaps[min(round(q * 10), 9)] += q - c
    assert found["ece"] == pytest.approx(sum(map(abs, gaps.values())) / n)
    right = [q for q, c in answers if c]
    wrong = [q for q, c in answers if not c]
    wins = [(q > p) + (q == p) / 2 for q in right for p in wrong]
    assert found.get("auroc") == (pytest.approx(np.mean(wins)) if wins else None)


def test_an_edge_of_calibration_belongs_to_the_bin_above() -> None:
    edges = np.arange(11, dtype=np.float32) / np.float32(10)
    # one answer per bin, but for the last, which has two: all gaps have the same sign
    assert stats.calibration(edges, np.zeros(11))["ece"] == pytest.approx(0.5)
    one_bin = stats.calibration(np.float32([0.7, 0.75]), [1, 0])  # gaps of -0.3 and 0.75
    assert one_bin["ece"] == pytest.approx(0.225)


def test_what_is_no_confidence_or_outcome_is_refused() -> None:
    others = [([], []), ([0.5], [1, 0]), ([1.5], [1]), ([math.nan], [1]), ([0.5], [0.5])]
    for confidence, correct in others:
        with pytest.raises(ValueError):
            stats.calibration(confidence, correct)

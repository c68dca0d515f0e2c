"""Calibration measures against direct formulas and cases worked out by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.evaluate import calibration
from minigrpo.runtime.calibration import error_by_chance, reliability

TENTHS = st.integers(0, 10).map(lambda k: k / 10)
ANSWERS = st.lists(st.tuples(TENTHS, st.integers(0, 1)), min_size=1, max_size=30)


@given(ANSWERS)
def test_each_measure_is_its_formula(answers: list[tuple[float, int]]) -> None:
    confidence, correct = (list(column) for column in zip(*answers, strict=True))
    n, found = len(answers), calibration(confidence, correct)
    assert found["brier"] == pytest.approx(sum((q - c) ** 2 for q, c in answers) / n)

    bins: dict[int, list[tuple[float, int]]] = {}
    for q, c in answers:
        bins.setdefault(min(round(q * 10), 9), []).append((q, c))
    gaps = (abs(sum(q for q, _ in one) - sum(c for _, c in one)) for one in bins.values())
    assert found["ece"] == pytest.approx(sum(gaps) / n)

    pairs = [(q, p) for (q, c), (p, d) in itertools.product(answers, answers) if c > d]
    wins = sum((q > p) + (q == p) / 2 for q, p in pairs)
    assert found.get("auroc") == (pytest.approx(wins / len(pairs)) if pairs else None)


def test_the_error_by_chance_is_that_of_true_confidences() -> None:
    rng = np.random.default_rng(0)
    stated = rng.integers(0, 11, 300) / 10
    errors = [calibration(stated, rng.random(300) < stated)["ece"] for _ in range(400)]
    assert error_by_chance(stated) == pytest.approx(np.mean(errors), rel=0.05)
    assert error_by_chance(np.array([0.0, 1.0])) == 0


def test_hand_made_cases() -> None:
    # sure and right, sure and wrong, and torn: errors 0, 1 and 0.25
    assert calibration([1, 1, 0.5, 0.5], [1, 0, 1, 0]) == {
        "brier": (0 + 1 + 0.25 + 0.25) / 4,
        "ece": 0.25,  # half of the answers say 1 and are right half of the time
        "auroc": 0.5,
    }
    # the confidences rank right above wrong, though all of them are far too low
    assert calibration([0.2, 0.1], [1, 0]) == {
        "brier": pytest.approx((0.64 + 0.01) / 2),
        "ece": pytest.approx((0.8 + 0.1) / 2),
        "auroc": 1,
    }
    assert calibration([0.9], [1]).keys() == {"brier", "ece"}  # no wrong answer to rank below


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_an_edge_belongs_to_the_bin_above_it_and_one_to_the_last(kind: type) -> None:
    edges = np.arange(11, dtype=kind) / kind(10)
    bins = reliability(edges, np.zeros(11))
    assert bins.count.tolist() == [1] * 9 + [2]
    assert bins.confidence[:9] == pytest.approx(edges[:9])
    just_below = np.full(3, np.nextafter(kind(0.65), kind(0)))
    assert reliability(just_below, np.ones(3)).count.tolist() == [0] * 6 + [3] + [0] * 3


def test_an_empty_bin_has_no_means() -> None:
    bins = reliability(np.array([0.55, 0.5]), np.array([1.0, 0.0]))
    assert bins.accuracy[5] == 0.5 and bins.confidence[5] == pytest.approx(0.525)
    assert all(math.isnan(bins.accuracy[k]) for k in range(10) if k != 5)


@pytest.mark.parametrize(
    ("confidence", "correct", "words"),
    [
        ([], [], "at least 1"),
        ([0.5], [1, 0], r"got shapes \[1\] and \[2\]"),
        ([1.5], [1], r"confidence must be in \[0, 1\], got 1.5"),
        ([math.nan], [1], "got nan"),
        ([0.5], [0.5], "correct must be 0 or 1, got 0.5"),
    ],
)
def test_other_values_are_refused(
    confidence: list[float], correct: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        calibration(confidence, correct)

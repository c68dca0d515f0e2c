"""Scores: how they are read from what a reward answers, what a failure costs, and their sum."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..advantages import neutral
from ..types import RewardTable, Scores


def as_numbers(answer: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of an answer as float64. Raises an error unless it is finite numbers of this shape."""
    numbers = _as_array(answer, shape)
    if not np.isfinite(numbers).all():
        raise ValueError(f"returned {answer!r:.80}, which is not finite")
    return numbers


def as_scores(answers: Any, number: int) -> Scores:
    """What a reward answers for `number` texts. Raises an error for answers of another shape.

    None says that the reward does not concern a text. A number that is not finite is a failure.
    """
    applies = np.ones(number, dtype=bool)
    if isinstance(answers, list | tuple):
        applies = np.array([answer is not None for answer in answers], dtype=bool)
        answers = [0.0 if answer is None else answer for answer in answers]
    numbers = _as_array(answers, (number,))
    is_finite = np.isfinite(numbers)
    known = applies & is_finite
    return Scores(np.where(known, numbers, 0.0), known, failed=~is_finite)


def _as_array(answer: Any, shape: tuple[int, ...]) -> np.ndarray:
    tensor = torch.as_tensor(answer, dtype=torch.float64, device="cpu")
    if tensor.shape != shape:
        raise ValueError(f"returned {answer!r:.80}, not numbers of the shape {list(shape)}")
    return tensor.detach().numpy().copy()


def settled(scores: Scores, weight: float) -> Scores:
    """`[P, G]` scores in which a failure counts as the worst of its group.

    In a group without any value, it counts as the worst of the batch: the group teaches nothing,
    and an evaluation does not leave it out. The worst is the largest value if the weight is
    negative. A failure stays without a value if the batch has none.
    """
    sign = 1.0 if weight >= 0 else -1.0
    answers = np.where(scores.known, sign * scores.values, np.inf)
    worst_of_group = answers.min(axis=1, keepdims=True)
    worst = np.where(np.isinf(worst_of_group), answers.min(), worst_of_group)
    replaced = scores.failed & np.isfinite(worst)
    values = np.where(replaced, sign * worst, scores.values)
    return Scores(values, scores.known | replaced, scores.failed)


def reward_table(
    scores: Mapping[str, Scores],
    weights: Mapping[str, float],
    shape: tuple[int, int],
) -> RewardTable:
    """The table of scores, `[P, G]` each, with what failures cost. `weights` says what adds up.

    A total that is not known counts as the worst of its group, or as 0 if none there is known.
    """
    table = {name: settled(each, weights.get(name, 1.0)) for name, each in scores.items()}
    total = np.zeros(shape)
    known = np.ones(shape, dtype=bool)
    for name, weight in weights.items():
        total += weight * neutral(table[name])
        # nobody knows what a reward would have given where it failed throughout
        known &= table[name].known | ~table[name].failed
    worst = np.where(known, total, np.inf).min(axis=1, keepdims=True)
    total = np.where(known, total, np.where(known.any(axis=1, keepdims=True), worst, 0.0))
    return RewardTable(total, known, table)

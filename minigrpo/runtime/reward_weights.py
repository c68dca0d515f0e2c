"""Read --reward-weights, and add reward parts up by them."""

import math
from collections.abc import Mapping

import numpy as np

from .flags import ConfigError
from .loss_arguments import FLOAT32_UP_TO


def parse_weights(text: str) -> dict[str, float]:
    """`part=number,...` as a mapping; empty for "". Raises ConfigError."""
    weights: dict[str, float] = {}
    if text and not text.strip(", "):
        raise ConfigError(f"--reward-weights must read part=number,..., got {text!r}")
    for item in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in item.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (name and math.isfinite(number)):
            raise ConfigError(f"--reward-weights must read part=number,..., got {item!r}")
        if name in weights:
            raise ConfigError(f"--reward-weights names {name} twice")
        weights[name] = number
    return weights


def narrow(scores: np.ndarray) -> np.ndarray:
    """Scores in float32, unless one is so large that float32 would merge different ones."""
    return scores if (np.abs(scores) > FLOAT32_UP_TO).any() else scores.astype(np.float32)


def weighted_sum(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """The total of reward parts `[P, G]`, in float32 if all weighted parts are small enough.

    A part that does not concern an example, which is NaN there, counts 0.
    """
    counted = {name: np.where(np.isnan(parts[name]), 0, parts[name]) for name in weights}
    terms = [np.float64(weight) * counted[name] for name, weight in weights.items()]
    if not all((np.abs(term) <= FLOAT32_UP_TO).all() for term in terms):
        return np.stack(terms).sum(axis=0)
    total = np.zeros_like(terms[0], dtype=np.float32)
    for name, weight in weights.items():
        total += np.float32(weight) * counted[name].astype(np.float32)
    return total


def total_so_far(
    parts: Mapping[str, np.ndarray], weights: Mapping[str, float], shape: tuple[int, ...]
) -> np.ndarray:
    """The weighted sum of those parts that are there, `[P, G]`: others may need tokens."""
    known = {name: weight for name, weight in weights.items() if name in parts}
    return weighted_sum(parts, known) if known else np.zeros(shape, dtype=np.float32)

"""Read --reward-weights."""

import math

from .flags import ConfigError


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

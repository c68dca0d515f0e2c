r"""The data of the model that ships for countdown: random searches (--config countdown-sft).

The control of GRPO in docs/results.md continues with such data:

    minigrpo train --task examples/countdown_sft.py --model minigrpo/assets/countdown.safetensors \
        --loss nll --group-size 1 --prompts-per-step 256 --learning-rate 5e-4 \
        --max-new-tokens 72 --eval-every 50 --out-dir runs/supervised-0
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minigrpo.tasks.countdown import Countdown, random_operation

STOP_PROBABILITY = 1 / 3  # probability that a search ends after an attempt that does not hit
MAX_ATTEMPTS = 8


class Attempt(NamedTuple):
    """Numbers that were combined until one was left."""

    value: int
    steps: str  # such as 4+3=7,7*5=35
    expression: str  # the same in one expression, (4+3)*5


def random_attempt(rng: np.random.Generator, numbers: Sequence[int]) -> Attempt:
    """Combine two random numbers, the larger one first, by a random operator until one is left."""
    pool = [(number, str(number)) for number in numbers]  # values with their expressions
    steps = []
    while len(pool) > 1:
        pair = [pool.pop(rng.integers(len(pool))) for _ in range(2)]
        (b, right), (a, left) = sorted(pair)
        sign, value = random_operation(rng, a, b)
        steps.append(f"{a}{sign}{b}={value}")
        pool.append((value, f"({left}{sign}{right})"))
    value, expression = pool[0]
    return Attempt(value, ",".join(steps), expression[1:-1])


def random_search(rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
    """Write random attempts, none of them twice, until one hits or after a random number.

    `<` follows an attempt that is below the target, and `>` one that is above.
    """
    text = ""
    made = set[str]()
    while True:
        attempt = random_attempt(rng, numbers)
        if attempt.steps not in made:
            made.add(attempt.steps)
            text += attempt.steps
            is_hit = attempt.value == target
            if is_hit or rng.random() < STOP_PROBABILITY or len(made) == MAX_ATTEMPTS:
                return text
            text += "<" if attempt.value < target else ">"
        elif rng.random() < STOP_PROBABILITY:  # there may be no other attempt
            return text[:-1]


class RandomSearches(Countdown):
    """Problems whose answer is a random search."""

    def answer(self, rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
        return random_search(rng, numbers, target)

r"""The data of the model that ships for countdown: random searches (--config countdown-sft).

The control of GRPO in docs/results.md continues with such data:

    minigrpo train --task examples/countdown_sft.py --model minigrpo/assets/countdown.safetensors \
        --loss nll --group-size 1 --prompts-per-step 256 --learning-rate 5e-4 \
        --max-new-tokens 72 --eval-every 50 --out-dir runs/supervised-0
"""

from collections.abc import Sequence

import numpy as np
from countdown import Problems, random_attempt

STOP_PROBABILITY = 1 / 3  # probability that a search ends after an attempt that does not hit
MAX_ATTEMPTS = 8


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


class RandomSearches(Problems):
    """Problems whose answer is a random search."""

    def answer(self, rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
        return random_search(rng, numbers, target)

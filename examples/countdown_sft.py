"""How the model that ships for countdown was made: by random searches (--config countdown-sft)."""

from collections.abc import Sequence

import numpy as np

from minigrpo.tasks.countdown import Countdown, random_attempt

# a search ends after an attempt that hits, and after this share of the others
STOP_SHARE, MAX_ATTEMPTS = 1 / 3, 8


def random_search(rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
    """Random attempts, none of them twice, until one hits or after a random number.

    `<` follows an attempt that is below the target, and `>` one that is above.
    """
    text, made = "", list[str]()
    while True:
        value, steps, _ = random_attempt(rng, numbers)
        if steps not in made:
            made.append(steps)
            text += steps
            if value == target or rng.random() < STOP_SHARE or len(made) == MAX_ATTEMPTS:
                return text
            text += "<" if value < target else ">"
        elif rng.random() < STOP_SHARE:  # perhaps there is no other
            return text[:-1]


class RandomSearches(Countdown):
    """Problems with a random search as the text to learn from."""

    def answer(self, rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
        return random_search(rng, numbers, target)

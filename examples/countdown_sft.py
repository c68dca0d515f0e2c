r"""The data of the model that ships for countdown: random searches (--config countdown-sft).

The control of GRPO in docs/results.md continues with such data:

    minigrpo train --task examples/countdown_sft.py --model minigrpo/assets/countdown.safetensors \
        --loss nll --group-size 1 --prompts-per-step 256 --learning-rate 5e-4 \
        --max-new-tokens 72 --eval-every 50 --out-dir runs/supervised-0
"""

from collections.abc import Sequence

import numpy as np
from countdown import Attempt, Problems, random_attempt
from numpy.random import Generator

STOP_PROBABILITY = 1 / 3  # probability that a search ends after an attempt that does not hit
MAX_ATTEMPTS = 8


def random_search(rng: Generator, numbers: Sequence[int], target: int) -> list[Attempt]:
    """Make random attempts, none of them twice, until one hits or after a random number."""
    attempts = dict[str, Attempt]()  # by their steps
    while True:
        attempt = random_attempt(rng, numbers)
        attempts[attempt.steps] = attempt
        is_last = attempt.value == target or len(attempts) == MAX_ATTEMPTS
        if is_last or rng.random() < STOP_PROBABILITY:  # an old one too: there may be no other
            return [*attempts.values()]


def short_text(attempts: Sequence[Attempt], target: int) -> str:
    """`<` follows an attempt that is below the target, and `>` one that is above."""
    text = ""
    for attempt in attempts[:-1]:
        text += attempt.steps + ("<" if attempt.value < target else ">")
    return text + attempts[-1].steps


def chat_text(attempts: Sequence[Attempt], target: int) -> str:
    """A thought with a line for each attempt. The last one is the answer."""
    verdicts = {-1: "too low", 0: "right", 1: "too high"}
    lines = [f"{x.growing}: {verdicts[np.sign(x.value - target)]}" for x in attempts]
    thought = "\n".join(["<think>", *lines, "</think>"])
    return f"{thought}\n<answer>{attempts[-1].expression}</answer>"


class RandomSearches(Problems):
    """Problems whose answer is a random search."""

    def answer(self, rng: Generator, numbers: Sequence[int], target: int) -> str:
        write = chat_text if self.form == "chat" else short_text
        return write(random_search(rng, numbers, target), target)

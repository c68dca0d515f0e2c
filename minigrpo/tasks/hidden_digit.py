"""Guess a hidden digit: how likely an answer is to be right is known for every question.

    prompt       47_1, 3 or 8:
    completion   8

Each question says which digits are possible: one, two, five or all ten, a quarter of the questions
each. The hidden digit is drawn from them with equal chances. So nobody can be right more often than
1, 1/2, 1/5 or 1/10 of the time, and with --confidence the best that can be stated is that number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .scoring import BatchScored
from .splits import is_held_out_prompt
from .task_request import TaskRequest

DIGITS = "0123456789"
HALVES = {"even": "02468", "odd": "13579", "below 5": "01234", "above 4": "56789"}
NUM_POSSIBLE = (1, 2, 5, 10)  # of each question in turn
LENGTH = 4  # of the number, the hidden digit included
# The KL keeps several confidences in use. Without it, all questions soon get the same one, and no
# comparison is left to learn from.
SETTINGS: Mapping[str, Any] = {
    "confidence": True,
    "max_new_tokens": 32,
    "scale": "none",
    "learning_rate": 1e-3,
    "kl_coef": 0.01,
    "max_steps": 400,
}


class HiddenDigit(BatchScored):
    """An endless supply of questions; `kind` is the chance of the best answer.

    Reward parts, each 1 or 0:
        exact: the completion is the hidden digit.
        possible: it is one of the digits that the question allows.
    """

    parts: Mapping[str, float] = {"exact": 1.0, "possible": 0.1}

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._example(number, held_out=False)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`; training has none with the same prompt."""
        return self._example(number, held_out=True)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        asked = list(zip(examples, texts, strict=True))
        exact = [text == example.answer for example, text in asked]
        possible = [
            len(text) == 1 and text in example.fields["possible"] for example, text in asked
        ]
        return {"exact": np.array(exact, float), "possible": np.array(possible, float)}

    def summaries(self, parts: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the best that any model can reach in the long run, to compare with.

        An answer that is right with probability p has a Brier score of p (1 - p) at best.
        """
        chances = 1 / np.array(NUM_POSSIBLE)
        return {
            "best_accuracy": float(chances.mean()),
            "best_brier": float((chances * (1 - chances)).mean()),
            "best_ece": 0.0,
        }

    def _example(self, number: int, *, held_out: bool) -> Example:
        rng = stream(self.seed, "hidden digit", number, int(held_out))
        size = NUM_POSSIBLE[number % len(NUM_POSSIBLE)]
        while True:  # a prompt in ten is held out
            prompt, possible = _question(rng, size)
            if is_held_out_prompt(prompt) == held_out:
                break
        answer = possible[int(rng.integers(size))]
        fields = {"possible": possible}
        return Example(prompt, answer, number, kind=f"1 of {size}", fields=fields)


def make(request: TaskRequest) -> HiddenDigit:
    """The task of --task hidden-digit."""
    return HiddenDigit(request.seed)


def _question(rng: np.random.Generator, size: int) -> tuple[str, str]:
    """A prompt with `size` possible digits, and these digits."""
    shown = [DIGITS[place] for place in rng.integers(10, size=LENGTH)]
    shown[int(rng.integers(LENGTH))] = "_"
    if size == 5:
        hint, possible = list(HALVES.items())[int(rng.integers(len(HALVES)))]
    else:
        possible = "".join(DIGITS[place] for place in sorted(rng.permutation(10)[:size]))
        hint = " or ".join(possible) if size < 10 else "any digit"
    return f"{''.join(shown)}, {hint}: ", possible

r"""A task of your own in one file: write a word backwards.

    minigrpo train --task examples/reverse.py --model scratch --loss nll --group-size 1 \
        --max-steps 600 --stop-after 400 --learning-rate 2e-3 --prompts-per-step 32 \
        --max-new-tokens 12 --out-dir runs/reverse-sft
    minigrpo train --task examples/reverse.py --model runs/reverse-sft --max-steps 200 \
        --max-new-tokens 12

The first command trains on true answers, because a model with random weights would never earn a
reward. The second one continues with GRPO. A task is a class with `reward_weights`, `train`,
`held_out` and `score`. The library calls it with the run's seed and with the --task-args, as far as
`__init__` names them.
"""

from collections.abc import Mapping

import numpy as np

from minigrpo.rewards.functions import similarity
from minigrpo.task import Task
from minigrpo.types import Example


class Reverse(Task):
    """Words to write backwards."""

    reward_weights: Mapping[str, float] = {
        "exact": 1.0,
        "similarity": 0.5,
    }  # name -> weight in the reward
    about = "words to write backwards"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        return self._example(number, held_out=False)

    def held_out(self, number: int) -> Example:
        return self._example(number, held_out=True)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Rewards in [0, 1] for any text."""
        return {
            "exact": float(text == example.answer),
            "similarity": similarity(text, example.answer),
        }

    def _example(self, number: int, *, held_out: bool) -> Example:
        """Example `number`, a function of (seed, number), so that a resumed run sees the same.

        The splits share no word: held-out words end in e or o, and training words do not.
        """
        rng = np.random.default_rng([self.seed, number, held_out])
        letters = rng.choice(list("abcdefghijklmnop"), rng.integers(3, 8))
        last_letters = "eo" if held_out else "aiu"
        word = "".join(letters) + rng.choice(list(last_letters))
        return Example(f"{word}=", word[::-1], number, kind=f"{len(word)} letters")

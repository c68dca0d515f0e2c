r"""A task of your own in one file: write a word backwards.

    minigrpo train --task examples/reverse.py --init-from scratch --loss nll --group-size 1 \
        --max-steps 600 --stop-after 400 --learning-rate 2e-3 --prompts-per-step 32 \
        --max-new-tokens 12 --out-dir runs/reverse-warm
    minigrpo train --task examples/reverse.py --init-from runs/reverse-warm --max-steps 200 \
        --max-new-tokens 12

The first command trains on true answers, because a model with random weights would never earn a
reward. The second one continues with GRPO. A task is a class with `parts`, `train`, `held_out` and
`score`; the library creates an instance with the run's seed.
"""

import numpy as np

from minigrpo.rewards import similarity
from minigrpo.types import Example


class Reverse:
    parts = {"exact": 1.0, "similarity": 0.5}  # noqa: RUF012 - reward part -> default weight

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        return self._example(number, held_out=False)

    def held_out(self, number: int) -> Example:
        return self._example(number, held_out=True)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Each part in [0, 1], for any text a model may write."""
        return {
            "exact": float(text == example.answer),
            "similarity": similarity(text, example.answer),
        }

    def _example(self, number: int, *, held_out: bool) -> Example:
        """Example `number`: a pure function of (seed, number), so that a resumed run sees the same
        words.

        The splits share no word: held-out words end in e or o, and training words do not.
        """
        rng = np.random.default_rng([self.seed, number, held_out])
        letters = rng.choice(list("abcdefghijklmnop"), rng.integers(3, 8))
        word = "".join(letters) + rng.choice(list("eo" if held_out else "aiu"))
        kind = f"{len(word)} letters"
        return Example(prompt=f"{word}=", answer=word[::-1], index=number, kind=kind)

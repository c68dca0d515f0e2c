r"""A task of one's own in one file: write a word backwards.

    python train.py --task examples/reverse.py --init-from scratch --loss nll --group-size 1 --max-steps 600 \
        --stop-after 400 --learning-rate 2e-3 --prompts-per-step 32 --max-new-tokens 12 --out-dir runs/reverse-warm
    python train.py --task examples/reverse.py --init-from runs/reverse-warm --max-steps 200 --max-new-tokens 12

The first command teaches by true answers, the second goes on with GRPO. A task is a class that is called with the seed and
has `parts`, `train`, `held_out` and `score`.
"""

import numpy as np

from minigrpo.rewards import similarity
from minigrpo.types import Example


class Reverse:
    parts = {"exact": 1.0, "similarity": 0.5}  # noqa: RUF012 - reward parts and their default weights

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        return self._example(number, held_out=False)

    def held_out(self, number: int) -> Example:
        return self._example(number, held_out=True)

    def score(self, example: Example, text: str) -> dict[str, float]:
        return {
            "exact": float(text == example.answer),
            "similarity": similarity(text, example.answer),
        }

    def _example(self, number: int, *, held_out: bool) -> Example:
        """A pure function of (seed, number), so that a resumed run sees the same words; only
        held-out ones end in e or o.
        """
        rng = np.random.default_rng([self.seed, number, held_out])
        letters = rng.choice(list("abcdefghijklmnop"), rng.integers(3, 8))
        word = "".join(letters) + rng.choice(list("eo" if held_out else "aiu"))
        return Example(
            prompt=f"{word}=", answer=word[::-1], index=number, kind=f"{len(word)} letters"
        )

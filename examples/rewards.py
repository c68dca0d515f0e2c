r"""Reward functions of one's own, on top of the parts that the task has:

    python train.py --data examples/sums.jsonl --init-from runs/sums-warm --rewards examples/rewards.py \
        --reward-weights exact=1,close=0.5,brevity=0.1 --max-new-tokens 8

from a model that has been taught true answers (the README has that command, too).

`example.prompt` and `example.answer` are what was asked and what is true, `text` is what the model wrote. A function that
raises, takes too long or returns no finite number does not stop the run: the completion gets the floor, and is counted.
"""

from minigrpo import reward
from minigrpo.types import Example


@reward(weight=0.5)
def close(example: Example, text: str) -> float:
    """How near a number is to the true one. What is no number raises, and gets the floor of 0."""
    return 1 / (1 + abs(int(text) - int(example.answer)))


@reward(weight=0.1, batched=True)
def brevity(examples: list[Example], texts: list[str]) -> list[float]:
    """Batched, as a reward model would be: many texts in one call, as many numbers, each a function
    of its own text.
    """
    return [1 / (1 + len(text)) for text in texts]

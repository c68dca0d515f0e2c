r"""Reward functions of your own, added to those of a task.

    minigrpo train --task prompts --data examples/sums.jsonl --model scratch --loss nll \
        --max-steps 600 --stop-after 400 --learning-rate 2e-3 --prompts-per-step 32 \
        --max-new-tokens 8 --out-dir runs/sums-sft
    minigrpo train --task prompts --data examples/sums.jsonl --model runs/sums-sft \
        --max-new-tokens 8 --rewards examples/rewards.py \
        --reward-weights exact=1,close=0.5,brevity=0.1

The first command trains on true answers, the second one with these rewards. `example.prompt` is the
question, `example.answer` is the truth, and `text` is the completion. If a function raises, takes
too long or does not return a finite number, the completion gets the worst reward of its group, and
the metrics count the failure. A function that fails on all completions of the first step, or of
three steps in a row, ends the run.
"""

from minigrpo import reward
from minigrpo.types import Example


@reward(weight=0.5)
def close(example: Example, text: str) -> float:
    """1 for the true number and less for others. A text without a number raises, and fails."""
    error = abs(int(text) - int(example.answer))
    return 1 / (1 + error)


@reward(weight=0.1, batched=True)
def brevity(examples: list[Example], texts: list[str]) -> list[float]:
    """Higher for shorter texts. One call scores a batch, as a reward model would.

    A value must depend only on its own text, because a batch may contain any texts.
    """
    return [1 / (1 + len(text)) for text in texts]

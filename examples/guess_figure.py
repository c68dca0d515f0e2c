"""Plot how many numbers are still possible after each guess of `--config guess`, beside halving.

    python examples/guess_figure.py runs/guess-0 runs/guess-1 --out docs/guess.png

It samples games of the model that ships and of each run.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np
import tyro
from guess import GUESSES, NUMBERS

from minigrpo.evaluate import grade, held_out_examples
from minigrpo.run.console import Console
from minigrpo.tools.models import ModelArguments, config_of, open_with_task


def narrowed(low: int, high: int, guess: int, secret: int) -> tuple[int, int]:
    """The lowest and the highest number that are possible after a guess."""
    if guess == secret:
        return secret, secret
    if guess < secret:
        return max(low, guess + 1), high
    return low, min(high, guess - 1)


def possible(secret: int, guesses: Sequence[int]) -> list[int]:
    """The count of possible numbers before and after each of GUESSES guesses.

    After the end of a game, the count stays the same.
    """
    low, high = 0, len(NUMBERS) - 1
    sizes = [high - low + 1]
    for guess in guesses:
        low, high = narrowed(low, high, guess, secret)
        sizes.append(high - low + 1)
    return sizes + sizes[-1:] * (GUESSES + 1 - len(sizes))


def halving(secret: int) -> list[int]:
    """The guesses that halve the possible numbers, until the secret is found."""
    low, high = 0, len(NUMBERS) - 1
    guesses = list[int]()
    while secret not in guesses:
        guess = (low + high) // 2
        low, high = narrowed(low, high, guess, secret)
        guesses.append(guess)
    return guesses


def sampled(model: str) -> np.ndarray:
    """The mean of `possible` over sampled games, `[GUESSES + 1]`."""
    task = str(Path(__file__).with_name("guess.py"))
    given = {"task": task, "tokenizer": "dialogue", "max_new_tokens": 20}
    config = config_of(ModelArguments(run=model), given)
    sampler, scorer = open_with_task(config, Console())
    examples = held_out_examples(scorer.task, 16 * len(NUMBERS))
    games = grade(sampler, scorer, examples, 1).texts
    rows = []
    for example, (game,) in zip(examples, games, strict=True):
        texts = [message["content"] for message in game.messages]
        guesses = [int(text) for text in texts if text in NUMBERS]
        rows.append(possible(int(example.answer), guesses))
    return np.mean(rows, axis=0)


def main(runs: tyro.conf.Positional[tuple[str, ...]], out: Path = Path("guess.png")) -> None:
    figure = matplotlib.figure.Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(sampled("minigrpo/assets/guess.safetensors"), ".-", color="0.55", label="before")
    for number, run in enumerate(runs):
        label = "" if number else f"after, {len(runs)} seeds"
        axes.plot(sampled(run), ".-", color="C0", label=label)
    halved = [possible(secret, halving(secret)) for secret in map(int, NUMBERS)]
    axes.plot(np.mean(halved, axis=0), "k:", label="halving")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16, 31], labels=["1", "2", "4", "8", "16", "31"])
    axes.set(xlabel="guess", ylabel="numbers still possible, mean")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=200)


if __name__ == "__main__":
    tyro.cli(main)

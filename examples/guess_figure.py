"""Draw how many numbers are still possible after each guess of `--task guess`, beside halving.

    python examples/guess_figure.py runs/guess-0 runs/guess-1 --out docs/guess.png

It samples games of the model that ships and of each run.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np
import tyro

from minigrpo.evaluate import grade, held_out
from minigrpo.run.console import Console
from minigrpo.tasks.guess import GUESSES, NUMBERS
from minigrpo.tools.evaluate import ModelArguments, load, parse


def possible(secret: int, guesses: Sequence[int] = ()) -> list[int]:
    """How many numbers are possible before and after each guess; without guesses, by halving."""
    low, high, sizes = 0, len(NUMBERS) - 1, [len(NUMBERS)]
    for turn in range(GUESSES):
        if turn < len(guesses) or not guesses:
            guess = guesses[turn] if guesses else (low + high) // 2
            low = max(low, guess + (guess < secret)) if guess <= secret else low
            high = min(high, guess - (guess > secret)) if guess >= secret else high
        sizes.append(high - low + 1)  # a found number is the only one
    return sizes


def sampled(model: str) -> np.ndarray:
    """The mean of `possible` over sampled games, `[GUESSES + 1]`."""
    _, config = parse(ModelArguments, [model, "--task", "guess"], "guess_figure.py")
    parts = load(config, Console())
    examples = held_out(parts.task, 16 * len(NUMBERS))
    games = grade(parts.sampler, parts.scorer, examples, 1).texts
    rows = []
    for example, (game,) in zip(examples, games, strict=True):
        said = [int(m["content"]) for m in game.messages if m["content"] in NUMBERS]
        rows.append(possible(int(example.answer), said))
    return np.mean(rows, axis=0)


def main(runs: tyro.conf.Positional[tuple[str, ...]], out: Path = Path("guess.png")) -> None:
    figure = matplotlib.figure.Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(sampled("shipped"), "o--", color="gray", label="before")
    for number, run in enumerate(runs):
        axes.plot(sampled(run), "-", color="C0", label="" if number else f"after, {len(runs)} runs")
    axes.plot(np.mean([possible(int(secret)) for secret in NUMBERS], axis=0), "k:", label="halving")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16, 31], labels=["1", "2", "4", "8", "16", "31"])
    axes.set(xlabel="guess", ylabel="numbers still possible, mean")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    tyro.cli(main)

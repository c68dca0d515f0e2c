"""The game `guess`: its rules, its examples, and the model that ships for it."""

from collections import Counter

import numpy as np
import pytest

from examples.guess import GUESSES, NUMBERS, Game, Guess
from minigrpo.config import Config
from minigrpo.evaluate import grade, held_out_examples
from minigrpo.run.console import Console
from minigrpo.tasks.loading import load_task
from minigrpo.text.encoding import encode_prompt
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.tools.models import open_with_task


def play(secret: str, *guesses: str) -> list[tuple[str, float, bool]]:
    game = Game()
    game.reset(secret)
    return [game.step(guess) for guess in guesses]


def test_halving_finds_every_number_by_the_fifth_guess() -> None:
    counts = []
    for secret in NUMBERS:
        low, high = 0, len(NUMBERS) - 1
        game = Game()
        game.reset(secret)
        count = 0
        word = ""
        while word != "=":
            count += 1
            guess = (low + high) // 2
            word, reward, over = game.step(str(guess))
            assert over == (word == "=")
            low, high = (low, guess - 1) if word == "<" else (guess + 1, high)
        assert reward == 1 + 0.5 * (GUESSES - count) / GUESSES
        counts.append(count)
    assert max(counts) == 5
    assert np.mean(counts) == pytest.approx(129 / 31)


def test_a_game_ends_with_what_is_no_number_or_with_the_last_guess() -> None:
    assert play("9", "15", "7", "9") == [("<", 0, False), (">", 0, False), ("=", 1.25, True)]
    assert play("9", *["15"] * 5, "8")[5] == (">", 0, True)
    assert play("9", *["15"] * 5, "9")[5] == ("=", 1, True)
    for text in ("", "31", "-1", "09", " 9", "nine", "٩", "9" * 5000):
        assert play("9", text) == [("?", 0, True)]


@pytest.mark.parametrize("start", [0, 31 * 7])
def test_every_secret_comes_equally_often_in_an_order_of_the_seed(start: int) -> None:
    def secrets(seed: int) -> list[str]:
        return [Guess(seed).train(number).answer for number in range(start, start + 31)]

    assert Counter(secrets(3)) == Counter(NUMBERS)
    assert secrets(3) == secrets(3) != secrets(4)
    assert [Guess(3).held_out(number).answer for number in range(62)] == NUMBERS * 2


def test_the_model_that_ships_plays_by_guessing_at_random() -> None:
    sampler, scorer = open_with_task(Config.from_toml("guess"), Console())
    games = grade(sampler, scorer, held_out_examples(scorer.task, 62), 4)
    assert 0.1 < games.right.values.mean() < 0.3  # 1 - (30 / 31)^6 = 0.18
    for example, texts in zip(games.examples, games.texts, strict=True):
        for text in texts:
            guesses = [message["content"] for message in text.messages[::2]]
            words = [message["content"] for message in text.messages[1::2]]
            assert [word for word, _, _ in play(example.answer, *guesses)] == words
            assert len(guesses) == GUESSES or words[-1] in "=?"


def test_it_learns_turns_that_end_as_in_play() -> None:
    task = load_task("examples/guess_sft.py", seed=0)
    tokenizer = load_tokenizer("dialogue")
    examples = [example for example in map(task.train, range(20)) if len(example.messages) > 1]
    assert {encode_prompt(tokenizer, x)[-1] for x in examples} == {tokenizer.turn_end}

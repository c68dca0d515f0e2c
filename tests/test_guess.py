"""The game `guess`: its rules, its examples, and the model that ships for it."""

from collections import Counter

import numpy as np
import pytest

from examples.guess import GUESSES, NUMBERS, Game, Guess
from minigrpo.config import Config
from minigrpo.evaluate import grade, held_out
from minigrpo.model.encoding import encode_prompt
from minigrpo.run.console import Console
from minigrpo.tasks.base import load_task
from minigrpo.tools.common import open_parts


def play(secret: str, *guesses: str) -> list[tuple[str, float, bool]]:
    game = Game()
    game.reset(secret)
    return [game.step(guess) for guess in guesses]


def test_halving_finds_every_number_by_the_fifth_guess() -> None:
    counts = []
    for secret in NUMBERS:
        low, high = 0, len(NUMBERS) - 1
        guesses = []
        word = ""
        while word != "=":
            guess = (low + high) // 2
            guesses.append(str(guess))
            word, reward, over = play(secret, *guesses)[-1]
            assert over == (reward > 0) == (word == "=")
            low, high = (low, guess - 1) if word == "<" else (guess + 1, high)
        assert reward == 1 + 0.5 * (GUESSES - len(guesses)) / GUESSES
        counts.append(len(guesses))
    assert max(counts) == 5 and np.mean(counts) == pytest.approx(129 / 31)


def test_a_game_ends_with_what_is_no_number_or_with_the_last_guess() -> None:
    assert play("9", "15", "7", "9") == [("<", 0, False), (">", 0, False), ("=", 1.25, True)]
    assert play("9", *["15"] * 5, "8")[4:] == [("<", 0, False), (">", 0, True)]
    assert play("9", *["15"] * 5, "9")[5] == ("=", 1, True)
    for text in ("", "31", "-1", "09", " 9", "9 ", "nine", "٩", "9" * 5000):
        assert play("9", text) == [("?", 0, True)]


def test_every_secret_comes_equally_often_in_an_order_of_the_seed() -> None:
    task, again, other = (Guess(seed) for seed in (3, 3, 4))
    for number in (0, 31 * 7):
        secrets = [task.train(number + i).answer for i in range(31)]
        assert Counter(secrets) == Counter(NUMBERS)
        assert secrets == [again.train(number + i).answer for i in reversed(range(31))][::-1]
        assert secrets != [other.train(number + i).answer for i in range(31)]
    assert [task.held_out(i).answer for i in range(62)] == NUMBERS * 2


def test_the_model_that_ships_plays_by_guessing_at_random() -> None:
    parts = open_parts(Config.from_toml("guess"), Console())
    games = grade(parts.sampler, parts.scorer, held_out(parts.task, 62), 4)
    assert 0.1 < games.right.mean() < 0.3  # 1 - (30 / 31)^6 = 0.18
    learnt = [load_task("examples/guess_sft.py", seed=0).train(i) for i in range(20)]
    ends = {encode_prompt(parts.tokenizer, x)[-1] for x in learnt if len(x.messages) > 1}
    assert ends == {parts.tokenizer.turn_end}  # as in play
    for example, texts in zip(games.examples, games.texts, strict=True):
        for text in texts:
            guesses, words = ([m["content"] for m in text.messages[i::2]] for i in (0, 1))
            assert [word for word, _, _ in play(example.answer, *guesses)] == words
            assert len(guesses) == GUESSES or words[-1] in "=?"

"""How the model that ships for guess was made: by random games (--config guess-sft)."""

from dataclasses import replace

from minigrpo.runtime.rng import stream
from minigrpo.tasks.guess import GUESSES, NUMBERS, PROMPT, Game, Guess
from minigrpo.types import Example


class RandomGames(Guess):
    """Games that have begun with random guesses, and go on by one: whatever was answered."""

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng, game = stream(self.seed, "guess/begun", example.index), Game()
        game.reset(example.answer)
        messages = [{"role": "user", "content": PROMPT}]
        wrong = [guess for guess in NUMBERS if guess != example.answer]
        for guess in rng.choice(wrong, rng.integers(GUESSES)).tolist():
            messages.append({"role": "assistant", "content": guess})
            messages.append({"role": "user", "content": game.step(guess)[0]})
        return replace(example, answer=str(rng.choice(NUMBERS)), messages=messages)

"""Guess a number from two words, `<` and `>`: a game that only several turns can teach.

    0-30: 15 < 7 > 11 < 9 =        the fourth of six guesses finds the secret, 9

`<` says that the secret is smaller than the guess, and `>` that it is larger. A player who always
halves the possible numbers finds each secret by the fifth guess at the latest, and by 4.16 guesses
on average. No example shows that to the model.

    minigrpo train --config guess
"""

from dataclasses import replace

from minigrpo import Example, Task
from minigrpo.rng import stream

PROMPT = "0-30: "
NUMBERS = [*map(str, range(31))]
GUESSES = 6


class Game:
    """A found secret earns 1, and half of the fraction of guesses that are left."""

    def reset(self, secret: str) -> None:
        self.secret = secret
        self.guesses_left = GUESSES

    def step(self, text: str) -> tuple[str, float, bool]:
        """The game's answer, the reward, and whether the game is over."""
        self.guesses_left -= 1
        if text == self.secret:
            return "=", 1 + 0.5 * self.guesses_left / GUESSES, True
        if text not in NUMBERS:
            return "?", 0.0, True
        word = "<" if int(self.secret) < int(text) else ">"
        return word, 0.0, self.guesses_left == 0


class Guess(Task):
    """Games with each secret equally often, in a shuffled order for training.

    Training sees every secret. Held-out games differ by the random numbers of their guesses.
    """

    environment = Game
    about = "games with a secret number from 0 to 30"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> Example:
        round_, place = divmod(number, len(NUMBERS))
        order = stream(self.seed, "guess", round_).permutation(len(NUMBERS))
        return replace(self.held_out(order[place]), index=number)

    def held_out(self, number: int) -> Example:
        secret = NUMBERS[number % len(NUMBERS)]
        return Example(PROMPT, secret, number, fields={"secret": secret})

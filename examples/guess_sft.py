"""How the model that ships for guess was made: by random games (--config guess-sft)."""

from dataclasses import replace

from minigrpo.runtime.rng import stream
from minigrpo.tasks.guess import GUESSES, NUMBERS, PROMPT, Game, Guess
from minigrpo.types import Example


class RandomGames(Guess):
    """Games that have begun with random guesses, and go on by the game's answer and a random guess.

    In play the game itself answers. A model that has learnt to predict it knows what the two words
    mean, but has seen no search.
    """

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng, game = stream(self.seed, "guess/begun", example.index), Game()
        game.reset(example.answer)
        guesses = rng.choice(NUMBERS, GUESSES).tolist()
        if example.answer in guesses:  # which ends the game
            del guesses[guesses.index(example.answer) + 1 :]
        begun = int(rng.integers(len(guesses) + 1))
        messages, word = [{"role": "user", "content": PROMPT}], ""
        for guess in guesses[:begun]:
            if word:
                messages.append({"role": "user", "content": word})
            messages.append({"role": "assistant", "content": guess})
            word = game.step(guess)[0]
        answer = word
        if word != "=" and begun < GUESSES:
            answer += str(rng.choice(NUMBERS))
        return replace(example, answer=answer, messages=messages)

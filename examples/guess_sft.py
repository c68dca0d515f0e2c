"""The data of the model that ships for guess: random games (--config guess-sft).

The control of GRPO in docs/results.md continues with such data:

    minigrpo train --config guess --task examples/guess_sft.py --loss nll --kl-coef 0
"""

from dataclasses import replace

from guess import GUESSES, NUMBERS, PROMPT, Game, Guess

from minigrpo.rng import stream
from minigrpo.types import Example


class RandomGames(Guess):
    """Games that begin with random guesses, and continue with the game's answer and another one.

    In play the game itself answers. A model that has learnt to predict the answers knows what the
    two words mean, but has never seen a search.
    """

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng = stream(self.seed, "guess/begun", example.index)

        # 1. Random guesses up to the end of the game, and how many of them have been made.
        guesses = rng.choice(NUMBERS, GUESSES).tolist()
        if example.answer in guesses:
            del guesses[guesses.index(example.answer) + 1 :]
        num_made = int(rng.integers(len(guesses) + 1))

        # 2. The messages so far, except for the game's last word.
        game = Game()
        game.reset(example.answer)
        messages = [{"role": "user", "content": PROMPT}]
        word = ""
        for guess in guesses[:num_made]:
            messages[-1]["content"] += word
            messages.append({"role": "assistant", "content": guess})
            # empty, so that the model learns the word at the end of its turn
            messages.append({"role": "user", "content": ""})
            word, _, _ = game.step(guess)

        # 3. The answer to learn: that word, and the next guess if the game goes on.
        answer = word
        if word != "=" and num_made < GUESSES:
            answer += str(rng.choice(NUMBERS))
        return replace(example, answer=answer, messages=messages)

"""How the model that ships for guess was made: by random games (--config guess-sft).

More of the same, as the control of GRPO in docs/results.md:

    minigrpo train --config guess --task examples/guess_sft.py --loss nll
"""

from dataclasses import replace

from guess import GUESSES, NUMBERS, PROMPT, Game, Guess

from minigrpo.runtime.rng import stream
from minigrpo.types import Example


class RandomGames(Guess):
    """Games that have begun with random guesses, and go on by the game's answer and a random guess.

    In play the game itself answers. A model that has learnt to predict it knows what the two words
    mean, but has seen no search.
    """

    def train(self, number: int) -> Example:
        example = super().train(number)
        rng = stream(self.seed, "guess/begun", example.index)

        # 1. Random guesses, up to the one that ends the game, of which some have been made.
        guesses = rng.choice(NUMBERS, GUESSES).tolist()
        if example.answer in guesses:
            del guesses[guesses.index(example.answer) + 1 :]
        num_made = int(rng.integers(len(guesses) + 1))

        # 2. What was said so far, except for the game's last word.
        game = Game()
        game.reset(example.answer)
        messages = [{"role": "user", "content": PROMPT}]
        word = ""
        for guess in guesses[:num_made]:
            messages[-1]["content"] += word
            messages.append({"role": "assistant", "content": guess})
            # empty, so that the turn has ended: the word is learnt
            messages.append({"role": "user", "content": ""})
            word, _, _ = game.step(guess)

        # 3. The text to learn: that word, and the next guess if the game goes on.
        answer = word
        if word != "=" and num_made < GUESSES:
            answer += str(rng.choice(NUMBERS))
        return replace(example, answer=answer, messages=messages)

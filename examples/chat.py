r"""Train a chat model from Python: ask it, reward what it writes, train ten steps, ask again.

    python examples/chat.py MODEL

MODEL is a chat model as Hugging Face publishes it: its folder, or ORG/NAME. The questions are the
sums in sums.jsonl, which the model's own chat template makes a conversation of. Ten steps on a few
sums show how the parts go together; for more than that, set more steps and data of your own.
"""

import re
import sys
from pathlib import Path

from minigrpo import Config, Trainer, reward
from minigrpo.model.encoding import decode
from minigrpo.types import Completions, Example

HERE = Path(__file__).resolve()


@reward(weight=1.0)
def solved(example: Example, text: str) -> float:
    """1 if the last number in the text is the true one."""
    return float(re.findall(r"-?\d+", text)[-1:] == [example.answer])


@reward(weight=0.1)
def brevity(example: Example, text: str) -> float:
    """Higher for shorter texts: 1/2 for 20 characters."""
    return 20 / (20 + len(text))


def ask(trainer: Trainer) -> None:
    """Print the most likely answers to questions that training leaves out."""
    questions = [trainer.task.held_out(number) for number in range(4)]
    completions = Completions.join(list(trainer.sampler.complete(questions)))  # greedy, one each
    for question, [text] in zip(questions, decode(trainer.tokenizer, completions), strict=True):
        print(f"{question.prompt} {text!r}, solved: {solved(question, text):.0f}")


def main(model: str) -> None:
    config = Config.of(
        model=model,
        task="prompts",
        data=str(HERE.with_name("sums.jsonl")),
        system="You are a calculator.",
        rewards=str(HERE),  # the functions above, also for a run that is resumed
        reward_weights="solved=1,brevity=0.1",
        prompts_per_step=4,
        group_size=8,
        max_new_tokens=32,
        learning_rate=1e-5,
        warmup_steps=2,
        max_steps=10,
        eval_size=16,
        use_amp=True,
    )
    trainer = Trainer(config)
    ask(trainer)
    trainer.fit()
    ask(trainer)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/chat.py MODEL")
    main(sys.argv[1])

"""Train a chat model on sums with rewards of your own, and ask it.

    python examples/chat.py MODEL

MODEL is a chat model as Hugging Face publishes it: its folder, or ORG/NAME. Ten steps only show how
everything fits together; use more steps and your own data. If a run was interrupted, the same
command continues it.
"""

import re
import sys

import minigrpo

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "solution": a + b}
    for a in range(20)
    for b in range(20)
]


@minigrpo.reward(success=True)
def solved(example: minigrpo.Example, text: str) -> float:
    """1 if the last number in the text is the true one."""
    numbers = re.findall(r"-?\d+(?:[./]\d+)*", text)  # 0.27 and 1/27 are no 27
    truth = str(example.fields["solution"])
    return float(numbers[-1:] == [truth])


@minigrpo.reward(weight=0.1)
def brevity(example: minigrpo.Example, text: str) -> float:
    """Higher for shorter texts: 1/2 for 20 characters."""
    return 20 / (20 + len(text))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/chat.py MODEL")
    run = minigrpo.train(
        model=sys.argv[1],
        data=ROWS,
        rewards=[solved, brevity],
        prompts_per_step=4,
        group_size=8,
        max_new_tokens=32,
        max_steps=10,
        eval_size=16,
        out_dir="runs/chat",
        resume="auto",
    )
    print(run.metrics["reward"])  # the mean of each step
    print(run.sample("What is 3 + 4?"))

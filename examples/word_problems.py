r"""Word problems such as GSM8K's, for a chat model: the data, and a reward for the last number.

    python examples/word_problems.py train.jsonl gsm8k-train.jsonl
    minigrpo train --config qwen2.5-0.5b

The first command reads lines with a `question` and an `answer` that ends with `#### NUMBER`, as
GSM8K has them. It writes lines with `messages`, which the model's own chat template turns into
prompts. The presets for chat models name this file as --rewards.
"""

import json
import re
import sys
from pathlib import Path

from minigrpo import reward
from minigrpo.types import Example

REQUEST = "Think step by step. End your answer with a line that holds the result as a number only."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@reward(weight=1.0)
def correct(example: Example, text: str) -> float:
    """1 if the last number of the text is the last one of the true answer."""
    found = last_number(text)
    return float(found is not None and found == last_number(example.answer))


def last_number(text: str) -> float | None:
    """The last number in a text, or None."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def convert(source: Path, target: Path) -> int:
    """Write the questions of a file as messages; return how many there are."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with target.open("w", encoding="utf-8") as file:
        for line in lines:
            messages = [{"role": "user", "content": f"{line['question']}\n\n{REQUEST}"}]
            answer = line["answer"].rpartition("####")[2].strip()
            file.write(json.dumps({"messages": messages, "answer": answer}) + "\n")
    return len(lines)


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])), "questions")

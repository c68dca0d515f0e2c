r"""Instructions that a program can check, on ordinary questions; SFT would have no data for them.

    minigrpo train --config instructions --out-dir runs/instructions

`python examples/from_gguf.py smollm2 smollm2` makes the model's folder. A question comes with one
or two instructions, such as "Use no capital letters." One question in ten and some pairs of
instructions are held out: `new pair` in the evaluations stands for pairs that training never has.

The file also has a reward for rows, from Hugging Face's course, which asks for 50 characters:

    python examples/instructions.py > questions.jsonl
    minigrpo train --model smollm2 --data questions.jsonl --rewards examples/instructions.py \
        --lora-rank 16 --group-size 8 --max-new-tokens 96 --max-steps 40 --out-dir runs/characters
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import minigrpo
from minigrpo.tasks.base import is_held_out

TOPICS = re.split(
    ", ",
    "bread, rain, the moon, a bicycle, coffee, honey, winter, the ocean, a garden, music, chess, "
    "a library, sleep, gravity, a volcano, butterflies, paper, salt, a bridge, the heart, money, "
    "a clock, football, tea, a forest, snow, dreams, a camera, glass, cats, a lighthouse, soap, "
    "the wind, trains, cheese, a mirror, fire, whales, rice, a map, friendship, shadows, robots, "
    "apples, a desert, laughter, steel, stars, a school, wool",
)
QUESTIONS = (
    "What is special about {}?",
    "Why do people like {}?",
    "Tell me something about {}.",
    "How would you describe {} to a child?",
    "What should everyone know about {}?",
    "What comes to mind when you think of {}?",
)
ASKED = [(question.format(topic), topic) for topic in TOPICS for question in QUESTIONS]
WORDS = ["maybe", "nature", "people", "light", "simple", "always", "world", "today"]


class Instruction(NamedTuple):
    sentence: str
    values: Sequence[Any]  # a question asks for one of them
    grade: Callable[[str, Any], float]  # (text, value) -> a grade in [0, 1], 1 if it is met


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def fraction(flags: Sequence[bool]) -> float:
    return sum(flags) / max(1, len(flags))


def ratio(found: int, wanted: int) -> float:
    return min(found, wanted) / max(found, wanted)


def nearness(words: list[str], word: str) -> float:
    """1 if the word is the first, 1/2 if it is the second, and so on."""
    return 1 / (1 + words.index(word)) if word in words else 0.0


def grade_list(text: str, length: int) -> float:
    lines = text.strip().splitlines()
    return ratio(len(lines), length) * fraction([line.startswith("- ") for line in lines])


def grade_json(text: str, key: str) -> float:
    try:
        value = json.loads(text)
    except ValueError:
        return fraction([text.startswith("{"), f'"{key}":' in text]) / 2
    return float(isinstance(value, dict) and [*value] == [key])


INSTRUCTIONS = {
    "words": Instruction(
        "Answer in exactly {} words.", range(4, 11), lambda text, n: ratio(len(text.split()), n)
    ),
    "lower": Instruction(
        "Use no capital letters.",
        [None],
        lambda text, _: fraction([word == word.lower() for word in text.split()]),
    ),
    "letter": Instruction(
        "Do not use the letter {}.",
        [*"aeionrst"],
        lambda text, letter: fraction([letter not in word for word in words_of(text)]),
    ),
    "first": Instruction(
        'Begin with the word "{}".', WORDS, lambda text, word: nearness(words_of(text), word)
    ),
    "last": Instruction(
        'End with the word "{}".', WORDS, lambda text, word: nearness(words_of(text)[::-1], word)
    ),
    "list": Instruction(
        'Answer with a list of {} items, each on its own line after "- ".', range(2, 6), grade_list
    ),
    "json": Instruction(
        'Answer with a JSON object whose only key is "{}".', ["answer", "text", "reply"], grade_json
    ),
}
ALONE = [(name,) for name in INSTRUCTIONS]
PAIRS = [
    ("words", "letter"), ("words", "first"), ("words", "last"), ("lower", "letter"),
    ("lower", "first"), ("lower", "list"), ("list", "last"), ("lower", "json"),
]  # fmt: skip
NEW_PAIRS = [("words", "lower"), ("first", "last"), ("lower", "last"), ("letter", "list")]


class Instructions(minigrpo.Task):
    """Questions with one or two instructions.

    An answer must also make some sense, or repeating one word would be the easiest way to comply.
    It needs four words or more, three in four of them different, and one of them the topic.
    """

    reward_weights: Mapping[str, float] = {"all_met": 1.0, "grade": 1.0}
    success = "all_met"
    about = f"{len(ASKED)} questions with instructions that a program checks"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, number: int) -> minigrpo.Example:
        return self._example(number, [*ALONE, *PAIRS])

    def held_out(self, number: int) -> minigrpo.Example:
        return self._example(number, NEW_PAIRS if number % 2 else [*ALONE, *PAIRS], held_out=True)

    def _example(
        self, number: int, combinations: Sequence[Sequence[str]], held_out: bool = False
    ) -> minigrpo.Example:
        """Example `number`, a function of (seed, number), so that a resumed run sees the same."""
        rng = np.random.default_rng([self.seed, number, held_out])
        known = [pair for pair in ASKED if is_held_out(pair[0]) == held_out]
        question, topic = known[rng.integers(len(known))]
        names = combinations[rng.integers(len(combinations))]
        sentences = [question]
        values = {}
        for name in names:
            choices = [x for x in INSTRUCTIONS[name].values if name != "letter" or x not in topic]
            values[name] = choices[rng.integers(len(choices))]
            sentences.append(INSTRUCTIONS[name].sentence.format(values[name]))
        prompt = " ".join(sentences)
        kind = "new pair" if names in NEW_PAIRS else " + ".join(names)
        messages = ({"role": "user", "content": prompt},)
        fields = {"values": values, "topic": topic.split()[-1]}
        return minigrpo.Example(prompt, "", number, kind, messages, fields)

    def score(self, example: minigrpo.Example, text: str) -> Mapping[str, float]:
        words = words_of(text)
        grades = [
            float(example.fields["topic"] in words),
            min(1, len(words) / 4),
            min(1, len({*words}) / max(1, 0.75 * len(words))),
        ]
        for name, value in example.fields["values"].items():
            grades.append(INSTRUCTIONS[name].grade(text, value))
        return {"all_met": float(min(grades) == 1), "grade": sum(grades) / len(grades)}


@minigrpo.reward
def fifty_characters(example: minigrpo.Example, text: str) -> float:
    """Higher for texts nearer to 50 characters, as in a lesson of Hugging Face's course."""
    return -abs(50 - len(text))


if __name__ == "__main__":
    for question, _ in ASKED:
        print(json.dumps({"prompt": [{"role": "user", "content": question}]}))

"""Questions with known answers, from JSONL files: docs/tasks.md has the format.

`--task-args judge=` says when a completion is right:

    exact  The completion is the answer. Prompts are used as they are; `similarity` pays for being
           close.
    qa     The last <answer>..</answer> matches an answer as in SQuAD and HotpotQA: case, articles,
           and punctuation outside of numbers do not count. A message asks the question, after its
           `context`.
    none   Only a reward function with success=True can say it. Rows need no answer. Reward
           functions get this task if no --task is given.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..rewards.functions import similarity
from ..types import REWARD, ConfigError, Example
from .base import Generated, SourceTask
from .rows import ANSWERS, Parse, Record, Row, parse_any, parse_episode, parse_pair
from .splits import Files, Rows

REQUEST = (
    "Think first if that helps. Then write the answer itself, in a few words, between <answer> and "
    "</answer>."
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# ASCII punctuation that does not belong to a number: 3.5 is not 35, -5 not 5, and 9/11 not 911
POINT, SIGN, BETWEEN_DIGITS = r"(?<![^\W\d])\.(?=\d)", r"(?<!\w)-(?=\$?\.?\d)", r"(?<=\d)[^,](?=\d)"
MARKS = re.compile(rf"(?!{POINT}|{SIGN}|{BETWEEN_DIGITS})[{re.escape(string.punctuation)}]")


class Prompts(SourceTask):
    """The task of `--task prompts --data FILE.jsonl`."""

    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        chat: bool = False,
        judge: str = "exact",
        environment: Any = None,
    ) -> None:
        """`environment` is an `EnvironmentSet` or None; if it asks, rows need no question."""
        if judge not in JUDGES:
            raise ConfigError(f"--task-args judge must be {' or '.join(JUDGES)}, got {judge}")
        self.reward_weights, parse = JUDGES[judge]
        self.success = next(iter(self.reward_weights), REWARD)
        if data or eval_data or not environment:
            if environment and judge == "none" and environment.reads_rows:
                parse = parse_episode
            super().__init__(Rows(seed, data, eval_data, parse))
        elif self.reward_weights:
            raise ConfigError("no reward: give the environment a get_reward, or give rewards")
        else:  # the environment asks by itself
            super().__init__(Generated(lambda number, _: Example("", index=number), "episodes"))
        # chat models reason before they answer, so proposing the answer's tokens is in vain
        self.speculate = judge == "exact" and not (chat or self.held_out(0).messages)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        if self.success == REWARD:
            return {}
        if self.success == "exact":
            truth = example.answer
            return {"exact": text == truth, "similarity": similarity(text, truth)}
        answer = normalized(tagged_answer(text, text))
        return {"correct": answer in map(normalized, example.fields["answers"])}


def parse_qa(record: Record) -> Row:
    """Read a question, its right answers, and a `context` if there is one.

    The context is a text, or the paragraphs of HotpotQA.
    """
    answers = next(record[key] for key in ANSWERS if key in record)
    if not isinstance(answers, list):
        answers = [answers]
    if not all(map(normalized, answers)):
        raise ValueError("an answer is empty")
    row = parse_pair({**record, "answer": answers[0]})
    context = record.get("context") or ""
    if not isinstance(context, str):
        paragraphs = zip(context["title"], context["sentences"], strict=True)
        context = "\n\n".join(f"{title}: {''.join(sentences)}" for title, sentences in paragraphs)
    example = replace(row.example, fields={**record, "answers": answers})
    if example.messages:
        return row._replace(example=example)
    content = f"{context}\n\n{example.prompt}\n\n{REQUEST}".strip()
    example = replace(example, messages=({"role": "user", "content": content},))
    return Row(f"{context}\n\n{row.question}", example)


def normalized(text: str) -> str:
    """A text in lower case, without punctuation (but in numbers), articles and extra white space.

    Two answers match if these are equal (SQuAD, arXiv 1606.05250; HotpotQA, arXiv 1809.09600). Less
    is removed from a text that would be empty, such as the choice "A" or the operator "+".
    """
    lower = text.lower()
    bare = MARKS.sub("", lower)
    forms = (" ".join(form.split()) for form in (ARTICLES.sub(" ", bare), bare, lower))
    return next(filter(None, forms), "")


# judge -> (weights of its rewards, the first of which says what is right; reader of rows)
JUDGES: Mapping[str, tuple[Mapping[str, float], Parse]] = {
    "exact": ({"exact": 1.0, "similarity": 0.2}, parse_pair),
    "qa": ({"correct": 1.0}, parse_qa),
    "none": ({}, parse_any),
}


def tagged_answer(text: str, default: str) -> str:
    """The text between the last <answer> and </answer>, or `default` if there are none."""
    before = text.rpartition("</answer>")[0]
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened else default

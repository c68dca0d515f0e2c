"""Questions with known answers, from JSONL files: docs/tasks.md has the format.

`--task-args judge=` says when a completion is right:

    exact  it is the answer. Prompts are used as they are; `similarity` pays for being close.
    qa     its last <answer>..</answer> matches an answer as for SQuAD and HotpotQA, whatever the
           case, articles, and punctuation outside of numbers. A question is asked in a message,
           after its `context`.
    none   nothing says so, or a reward function with success=True. Rows need no answer. This is
           what reward functions get if no --task is given.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..rewards import similarity
from ..types import REWARD, ConfigError, Example
from .base import Generated, SourceTask, tagged_answer
from .data import ANSWERS, Files, Parse, Record, Row, Rows, parse_any, parse_episode, parse_pair

REQUEST = (
    "Think first if that helps. Then write the answer itself, in a few words, between <answer> and "
    "</answer>."
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# ASCII punctuation, without the marks of numbers: 3.5 is not 35, -5 not 5, and 9/11 not 911
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
        """`environment`: an `EnvironmentSet`, which may say what is asked, so no row needs to."""
        if judge not in JUDGES:
            raise ConfigError(f"--task-args judge must be {' or '.join(JUDGES)}, got {judge}")
        self.parts, parse = JUDGES[judge]
        self.success = next(iter(self.parts), REWARD)
        if environment and not (data or eval_data):
            if self.parts:
                raise ConfigError("no reward: give the environment a get_reward, or give rewards")
            # the environment asks by itself
            super().__init__(Generated(lambda number, _: Example("", index=number), "episodes"))
        else:
            if environment and judge == "none":
                is_read = bool(environment.parts)
                parse = partial(parse_episode, is_read=is_read, told=environment.reset_keys)
            super().__init__(Rows(seed, data, eval_data, parse))
        # chat models reason before the answer: its tokens would be proposed in vain
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
    """A question, its right answers, and perhaps a `context`: a text, or HotpotQA's paragraphs."""
    answers = next(record[key] for key in ANSWERS if key in record)
    answers = answers if isinstance(answers, list) else [answers]
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

    Two answers match if these are equal (SQuAD, arXiv 1606.05250; HotpotQA, arXiv 1809.09600). Of a
    text that would be empty, such as the choice "A" or the operator "+", less is removed.
    """
    lower = text.lower()
    bare = MARKS.sub("", lower)
    forms = (" ".join(form.split()) for form in (ARTICLES.sub(" ", bare), bare, lower))
    return next(filter(None, forms), "")


# the parts, of which the first says what is right, with their weights; and how a row is read
JUDGES: Mapping[str, tuple[Mapping[str, float], Parse]] = {
    "exact": ({"exact": 1.0, "similarity": 0.2}, parse_pair),
    "qa": ({"correct": 1.0}, parse_qa),
    "none": ({}, parse_any),
}

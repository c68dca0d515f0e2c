"""Questions with short answers, compared as SQuAD and HotpotQA do: a task of your own on rows.

    minigrpo train --model Qwen/Qwen2.5-0.5B-Instruct --task examples/qa.py --data hotpot_qa.jsonl

The last <answer>..</answer> of a completion, or all of it, must match an answer. Case, articles,
and punctuation outside of numbers do not count. `answer` may be a list of right answers. A message
asks the question, after its `context`. So the model needs a chat template.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import replace

from minigrpo.tasks.base import Files, Rows, SourceTask
from minigrpo.tasks.prompts import REQUEST, tagged_answer
from minigrpo.tasks.rows import ANSWERS, Record, Row, parse_pair, text_field
from minigrpo.types import Example

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# ASCII punctuation that does not belong to a number: 3.5 is not 35, -5 not 5, and 9/11 not 911
POINT, SIGN, BETWEEN_DIGITS = r"(?<![^\W\d])\.(?=\d)", r"(?<!\w)-(?=\$?\.?\d)", r"(?<=\d)[^,](?=\d)"
MARKS = re.compile(rf"(?!{POINT}|{SIGN}|{BETWEEN_DIGITS})[{re.escape(string.punctuation)}]")


class QA(SourceTask):
    """The task of rows with right answers."""

    reward_weights: Mapping[str, float] = {"correct": 1.0}
    success = "correct"

    def __init__(self, seed: int, data: Files = (), eval_data: Files = ()) -> None:
        super().__init__(Rows(seed, data, eval_data, parse_qa))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        answer = normalized(tagged_answer(text, text))
        return {"correct": answer in map(normalized, example.fields["answers"])}


def parse_qa(record: Record) -> Row:
    """Read a question, its right answers, and a `context` if there is one.

    The context is a text, or the paragraphs of HotpotQA.
    """
    answers = next((record[key] for key in ANSWERS if key in record), "")
    if not isinstance(answers, list):
        answers = [answers]
    answers = [text_field({"answer": answer}, ["answer"]) for answer in answers]
    if not all(map(normalized, answers)):
        raise ValueError("an answer is empty")
    row = parse_pair({**record, "answer": answers[0]})
    context = record.get("context") or ""
    if not isinstance(context, str):
        paragraphs = zip(context["title"], context["sentences"], strict=True)
        context = "\n\n".join(f"{title}: {''.join(sentences)}" for title, sentences in paragraphs)
    example = replace(row.example, fields={**record, "answers": answers})
    if example.messages:
        if context:
            raise ValueError("has a context and messages: put the context into the message")
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

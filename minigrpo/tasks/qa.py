"""Questions whose answers are short texts, scored by exact match as HotpotQA and SQuAD are.

A line of --data FILE.jsonl has a `question` (or `problem`, as RLCR's own data names it), and an
`answer`: a text, or a list of texts any of which is right. A `context` is optional: a text, or
HotpotQA's paragraphs. All of a question is one user message, so the model needs a chat template.
"""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime.text import has_lone_surrogate, short
from ..types import Example
from .data_lines import parse_record
from .pairs import JSONLExamples
from .scoring import BatchScored
from .task_request import TaskRequest

FORM = 'must be an object like {"question": "...", "answer": "..."}'
REQUEST = (
    "Think first if that helps. Then write the answer itself, in a few words, between <answer> and "
    "</answer>."
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ANSWER = re.compile(r"<answer>([^<]*+(?:<(?!/?answer>)[^<]*+)*)</answer>")


def normalized(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles and extra white space.

    Two answers match if these are equal (SQuAD, arXiv 1606.05250; HotpotQA, arXiv 1809.09600). Of a
    text that would be empty, such as the choice "A" or the operator "+", less is removed.
    """
    lower = text.lower()
    bare = lower.translate(NO_PUNCTUATION)
    forms = (" ".join(form.split()) for form in (ARTICLES.sub(" ", bare), bare, lower))
    return next(filter(None, forms), "")


def exact_match(text: str, answers: Iterable[str]) -> bool:
    """Whether a text is one of the answers, once `normalized`. An empty text never is."""
    found = normalized(text)
    return bool(found) and any(found == normalized(answer) for answer in answers)


class QuestionAnswering(JSONLExamples, BatchScored):
    """The task of `--task qa --data FILE.jsonl`.

    The only reward part is `correct`: 1 if the text of the last <answer>...</answer>, or the whole
    completion if it has none, matches an answer.
    """

    parts: Mapping[str, float] = {"correct": 1.0}
    success = "correct"

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        asked = zip(examples, texts, strict=True)
        right = [exact_match(answered(text), example.fields["answers"]) for example, text in asked]
        return {"correct": np.array(right, dtype=float)}


def answered(text: str) -> str:
    """Return what stands between the last <answer> and </answer>, or all of a text without them."""
    found = ANSWER.findall(text)
    return str(found[-1]) if found else text


def read(request: TaskRequest) -> QuestionAnswering:
    """The task of the files of --data. Raises ValueError in one line."""
    return QuestionAnswering(request.paths, request.seed, request.listener, parse_line)


def parse_line(line: str) -> Example:
    """Return the example of a JSON line. Raises ValueError that says what is allowed."""
    record = parse_record(line, FORM)
    question: Any = record.get("question", record.get("problem"))
    answer: Any = record.get("answer")
    answers: list[Any] = answer if isinstance(answer, list) else [answer]
    for name, value in (("question", question), *(("answer", text) for text in answers)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{FORM}, {name} is {short(value)}")
    if not answers:
        raise ValueError(f"{FORM}, answer is []")
    content = "\n\n".join([*_paragraphs(record.get("context")), question, REQUEST])
    if has_lone_surrogate(content + "".join(answers)):
        raise ValueError("has half of a surrogate pair, which is no character")
    messages = ({"role": "user", "content": content},)
    fields = {**record, "answers": answers}
    return Example(question, answers[0], messages=messages, fields=fields)


def _paragraphs(context: Any) -> list[str]:
    """The texts of a `context`. Raises ValueError for anything but the forms above."""
    if context is None or isinstance(context, str):
        return [context] if context else []
    try:
        if isinstance(context, Mapping):  # a table of columns, as the Hub has it
            columns = context["title"], context["sentences"]
            context = [list(pair) for pair in zip(*map(_list, columns), strict=True)]
        pairs = [_list(pair) for pair in _list(context)]
        return [f"{_text(title)}: {''.join(map(_text, _list(x)))}" for title, x in pairs]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"context must be a text, or HotpotQA's titles and sentences, got {short(context)}"
        ) from None


def _list(value: Any) -> list[Any]:
    """The value, which must be a list: a text or an object would be taken apart. Or TypeError."""
    if not isinstance(value, list):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value

"""Questions from JSONL files or Python: how rows are read, which are held out, in which order.

`--data` is trained on, and `--eval-data` is held out whole. Without the latter a tenth of the
questions of `--data` is held out, by a hash of the question. A question counts once in an
evaluation, however often it is in a file and whatever else its lines say.
"""

import copy
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import refusing
from ..runtime.rng import stream
from ..task import Task
from ..types import ConfigError, Example
from .base import fingerprint, is_held_out, question_of

QUESTIONS = ("prompt", "question", "problem")  # keys of a question, the first that a line has
ANSWERS = ("answer", "completion", "solution")
CHATS = ("messages", "prompt", "completion")  # keys of lists of messages, in order
Record = Mapping[str, Any]  # a row as it was given
Files = Sequence[Path | Sequence[Record]]  # files, or rows themselves


class Row(NamedTuple):
    """A line of a file."""

    question: str  # what decides whether two lines ask the same
    example: Example
    test: bool = False  # a published test row: held out without --eval-data, unless all are
    told: str = ""  # what an environment reads of it, which tells rows of few questions apart


Parse = Callable[[Any], Row]  # a line's object -> its row; any exception refuses it


def question_key(text: str) -> str:
    """A question without what copies of it differ in: white space, and Unicode's forms."""
    if not (words := unicodedata.normalize("NFC", text).split()):
        raise ValueError("the question is empty")
    return " ".join(words)


def text_of(record: Record, keys: Iterable[str], default: str | None = None) -> str:
    """The text or number under the first of the keys that a row has; NaN and null are missing.

    Raises ValueError if all are missing and there is no default.
    """
    for key in keys:
        value = record.get(key)
        if value is None or value != value:
            continue
        if not isinstance(value, str | Real):
            raise ValueError(f"{key} must be a text or a number, got {value!r:.60}")
        return str(value)
    if default is None:
        raise ValueError(f"needs a text under {' or '.join(keys)}")
    return default


def parse_pair(record: Record, default: str | None = None) -> Row:
    """A question, or the messages of a chat, and an answer; all are used as they are.

    Messages stand under `messages` (OpenAI's form), or under `prompt` and `completion` (TRL's). The
    last one, if it is the assistant's, is the answer.
    """
    chats = [record[key] for key in CHATS if is_chat(record.get(key))]
    messages = [as_templates_write(message) for chat in chats for message in chat]
    if messages and messages[-1]["role"] == "assistant":
        default = messages.pop()["content"]
    question = question_of(messages) or text_of(record, QUESTIONS)
    keys = [key for key in ANSWERS if not is_chat(record.get(key))]
    answer = text_of(record, keys, default)
    tools: Any = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    tools = [*tools] if is_chat(tools) else None
    example = Example(question, answer, messages=tuple(messages), fields=record, tools=tools)
    return Row(question, example)


parse_any = partial(parse_pair, default="")  # of rows that may have no answer


def parse_begun(environments: Any, record: Record) -> Row:
    """A row of a run with environments, which are told all of it, or with tools alone."""
    whole = json.dumps(record, sort_keys=True, default=str)
    has_question = {*QUESTIONS, *CHATS} & record.keys()
    row = parse_any(record) if has_question else Row(whole, Example("", fields=record))
    return row._replace(told=whole if environments else "")


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, as JSON or Arrow has it."""
    is_list = isinstance(value, list | tuple | np.ndarray)
    return is_list and all(isinstance(message, Mapping) for message in value)


def as_templates_write(message: Record) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, arguments of calls are objects.

    OpenAI's form has a list of parts, or null, as a content, and JSON as arguments.
    """
    found = copy.deepcopy(message)
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    for call in found.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    return {**found, "content": content}


class Rows(Task):
    """The examples of files. An epoch visits every row once, in an order of its own."""

    def __init__(self, seed: int, data: Files, eval_data: Files, parse: Parse) -> None:
        """Without `data` there is nothing to train on. Raises ConfigError for an empty split."""
        self.seed, self.parse = seed, parse
        rows, held_out = self.read(data), self.read(eval_data)
        if len({row.question for row in rows + held_out}) < 10:  # of which a tenth is none
            for side in (rows, held_out):
                side[:] = [row._replace(question=row.question + row.told) for row in side]
        if not eval_data:
            held_out = [row for row in rows if row.test]
            if len(held_out) in (0, len(rows)):  # no such split, or one side of it
                chosen = [row for row in rows if is_held_out(row.question)]
                held_out = chosen or sorted(rows, key=lambda row: fingerprint(row.question))[:1]
        first: dict[str, Example] = {}
        for row in held_out:
            first.setdefault(row.question, row.example)
        train = [row for row in rows if row.question not in first]
        self._train, self._held_out = [row.example for row in train], list(first.values())
        self.num_train, self.num_held_out = len(train), len(first)
        self.about = f"{len(train)} of {len(rows)} rows, {len(first)} questions held out"
        if not first or (data and not train):
            said = "two different questions at least, or --eval-data, are needed"
            raise ConfigError(f"--data: {self.about}; {said}")
        self.questions = _hashes(row.question for row in train), _hashes(first)

    def read(self, files: Files) -> list[Row]:
        """The rows of JSONL files, or of a caller. Raises ConfigError for a bad one."""
        rows = []
        for source in files:
            records: Any = source
            place = "the data, row"
            if isinstance(source, Path):  # as bytes: in a text, U+2028 would end a line too
                records, place = source.read_bytes().splitlines(), f"{source}, line"
            for number, record in enumerate(records, 1):
                is_line = isinstance(record, bytes)
                if is_line and not record.strip():
                    continue
                with refusing(f"{place} {number}"):  # a line may hold anything
                    row = self.parse(json.loads(record) if is_line else record)
                    rows.append(row._replace(question=question_key(row.question)))
        return rows

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._train))
        order = permutation(self.seed, epoch, len(self._train))
        return replace(self._train[int(order[place])], index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)], index=number)

    def longest(self, number: int) -> Sequence[Example]:
        every = self._train + self._held_out
        return sorted(every, key=lambda x: -len(f"{x.prompt}{x.messages}{x.answer}"))[:number]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the n rows in an epoch."""
    return stream(seed, "pairs", epoch).permutation(n)


def _hashes(questions: Iterable[str]) -> np.ndarray:
    return np.unique(np.array([*map(fingerprint, questions)], dtype=np.uint64))

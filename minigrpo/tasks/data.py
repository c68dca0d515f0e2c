"""Questions from JSONL files: how lines are read, which are held out, in which order they come.

`--data` is trained on, and `--eval-data` is held out whole. Without the latter a tenth of the
questions of `--data` is held out, by a hash of the question. A question counts once in an
evaluation, however often it is in a file and whatever else its lines say.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runtime.rng import stream
from ..task import Task
from ..types import ConfigError, Example
from .base import fingerprint, is_held_out, question_of

QUESTIONS = ("prompt", "question", "problem")  # keys of a question, the first that a line has
ANSWERS = ("answer", "completion", "solution")
Files = Sequence[Path]


class Row(NamedTuple):
    """A line of a file."""

    question: str  # what decides whether two lines ask the same
    example: Example


Parse = Callable[[Any], Row]  # a line's object -> its row; any exception refuses it


def question_key(text: str) -> str:
    """A question without what copies of it differ in: white space, and Unicode's forms."""
    if not (words := unicodedata.normalize("NFC", text).split()):
        raise ValueError("the question is empty")
    return " ".join(words)


def read_rows(files: Files, parse: Parse) -> list[Row]:
    """The rows of JSONL files. Raises ConfigError for a bad line."""
    rows = []
    for path in files:
        with open(path, "rb") as file:  # as bytes: only a newline ends a line, and all are counted
            for number, line in enumerate(file, 1):
                try:
                    if text := line.decode("utf-8-sig").strip():
                        record = json.loads(text)
                        # half of a surrogate pair ("\ud800") raises here, and not in a log
                        json.dumps(record, ensure_ascii=False).encode()
                        question, example = parse(record)
                        rows.append(Row(question_key(question), example))
                except Exception as error:  # KeyError, RecursionError: a line may hold anything
                    reason = f"{type(error).__name__}: {error}"
                    raise ConfigError(f"{path}, line {number}: {reason}") from error
    return rows


def text_of(record: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The text under the first of the keys that a line has; a null counts as missing."""
    for key in keys:
        if (value := record.get(key)) is not None:
            if not isinstance(value, str):
                raise ValueError(f"{key} must be a text, got {value!r:.60}")
            return value
    raise ValueError(f"needs a text under {' or '.join(keys)}")


def parse_pair(record: dict[str, Any]) -> Row:
    """A question or the messages of a chat, and an answer; both are used as they are."""
    return parse_question(record, text_of(record, ANSWERS))


def parse_question(record: dict[str, Any], answer: str) -> Row:
    """The row of a line whose answer is known."""
    messages = tuple(record.get("messages") or ())
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: its text belongs into the answer")
    question = question_of(messages) or text_of(record, QUESTIONS)
    return Row(question, Example(question, answer, messages=messages, fields=record))


class Rows(Task):
    """The examples of files. An epoch visits every row once, in an order of its own."""

    def __init__(self, seed: int, data: Files, eval_data: Files, parse: Parse) -> None:
        """Without `data` there is nothing to train on. Raises ConfigError for an empty split."""
        self.seed, self.parse = seed, parse
        rows, held_out = self.read(data), self.read(eval_data)
        first: dict[str, Example] = {}
        for row in held_out if eval_data else self.choose_held_out(rows):
            first.setdefault(row.question, row.example)
        train = [row for row in rows if row.question not in first]
        self._train, self._held_out = [row.example for row in train], list(first.values())
        self.num_held_out = len(first)
        self.about = f"{len(train)} of {len(rows)} rows, {len(first)} questions held out"
        if not first or (data and not train):
            raise ConfigError(f"--data: {self.about}; each needs at least one")
        self.questions = _hashes(row.question for row in train), _hashes(first)

    def read(self, files: Files) -> list[Row]:
        return read_rows(files, self.parse)

    def choose_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of --data that are held out if there is no --eval-data."""
        return [row for row in rows if is_held_out(row.question)]

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._train))
        order = permutation(self.seed, epoch, len(self._train))
        return replace(self._train[int(order[place])], index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)], index=number)

    def longest(self, number: int) -> Sequence[Example]:
        def size(example: Example) -> int:
            return len(f"{example.prompt}{example.messages}{example.answer}")

        return sorted(self._train + self._held_out, key=size, reverse=True)[:number]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the n rows in an epoch."""
    return stream(seed, "pairs", epoch).permutation(n)


def _hashes(questions: Iterable[str]) -> np.ndarray:
    return np.unique(np.array([*map(fingerprint, questions)], dtype=np.uint64))

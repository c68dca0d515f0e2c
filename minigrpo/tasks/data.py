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


Parse = Callable[[dict[str, Any]], Row]  # a line's object -> its row; any exception refuses it


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
        rows = read_rows(data, parse)
        held_out, which = read_rows(eval_data, parse), ", ".join(map(str, eval_data))
        if not eval_data:
            held_out, which = self.choose_held_out(rows)
        first: dict[str, Row] = {}
        for row in held_out:
            first.setdefault(row.question, row)
        self._held_out = list(first.values())
        self._train = [row for row in rows if row.question not in first]
        self.seed, self.num_held_out = seed, len(first)
        self.about = f"{len(self._train)} rows, {len(first)} questions held out ({which})"
        if not first or (data and not self._train):
            raise ConfigError(f"--data: {self.about}; each needs at least one")
        if eval_data and (both := len(rows) - len(self._train)):
            self.about += f"; {both} rows of --data ask one of them and are left out"
        self.questions = _hashes(self._train), _hashes(self._held_out)
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def choose_held_out(self, rows: Sequence[Row]) -> tuple[list[Row], str]:
        """The rows of --data that are held out, and which these are."""
        return [row for row in rows if is_held_out(row.question)], "one in 10, by hash"

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._train))
        example = self._train[int(self._order(epoch)[place])].example
        return replace(example, index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)].example, index=number)

    def longest(self, number: int) -> Sequence[Example]:
        def size(row: Row) -> int:
            example = row.example
            return len(f"{example.prompt}{example.messages}{example.answer}")

        rows = sorted(self._train + self._held_out, key=size, reverse=True)
        return [row.example for row in rows[:number]]

    def _shuffle(self, epoch: int) -> np.ndarray:
        return stream(self.seed, "pairs", epoch).permutation(len(self._train))


def _hashes(rows: Sequence[Row]) -> np.ndarray:
    return np.unique(np.array([fingerprint(row.question) for row in rows], dtype=np.uint64))

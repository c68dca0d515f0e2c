"""Questions from JSONL files or Python: how rows are read, which are held out, in which order.

`--eval-data` is held out whole; without it a tenth of the questions of `--data`, by a hash. A
question is all that is asked: the messages, the tools and the template's variables. It counts once
in an evaluation, whatever else its lines say.
"""

import copy
import json
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from functools import lru_cache, partial
from itertools import islice
from math import isnan
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..errors import collecting, refuse_rows, refusing
from ..identity import digest
from ..runtime.rng import stream
from ..task import Task
from ..types import ConfigError, Example
from .base import fingerprint, is_held_out, question_of

QUESTIONS = ("prompt", "question", "problem")  # keys of a question, the first that a row has
ANSWERS = ("answer", "completion", "solution")
# keys of a message that chat templates write, besides calls of tools
WRITTEN = ("role", "name", "content", "reasoning_content", "thinking")
MOST_ROWS, MOST_CHARACTERS = 1_000_000, 1 << 30  # of what does not say how many rows it has
Record = Mapping[str, Any]  # a row as it was given
Files = Sequence[Path | Sequence[Record]]  # files, or rows themselves


class Row(NamedTuple):
    question: str  # tells rows apart that ask something else; the prompt may show less of it
    example: Example
    is_test: bool = False  # held out by its source: a published test split, or the rule of chess
    # what else may tell it apart: what an environment reads, or the beginning of the answer
    extra_key: str = ""  # see `tell_apart`


Parse = Callable[[Any], Row]  # what a line holds, whatever it is -> a row; any exception refuses it


def rows_of(name: str, data: Any) -> list[Record]:
    """The rows that a caller gives: of a table, or of whatever yields dicts. Raises ConfigError."""
    rows: Any = data
    if hasattr(data, "itertuples"):  # pandas has several values that stand for a missing one
        gaps = [x for x in data if data[x].dtype.kind == "f" and data[x].isna().any()]
        data = data.assign(**data[gaps].convert_dtypes())  # whole numbers, which a gap made floats
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
    for read in ("to_dicts", "to_pylist"):  # of polars, of pyarrow
        rows = getattr(data, read)() if hasattr(data, read) else rows
    is_series = isinstance(rows, Iterable) or getattr(rows, "__getitem__", None)
    forms = "file names or rows (a list of dicts, a Dataset of one split, a DataFrame)"
    refusal = ConfigError(f"{name} must be {forms}, got a {type(data).__name__}")
    if isinstance(rows, Mapping) or not is_series:
        raise refusal
    found = list[Record]()
    # what answers to any number, such as torch's Dataset, goes on after its length
    length = len(rows) if hasattr(rows, "__len__") else None
    num_characters = 0
    for row in islice(rows, length):
        if not isinstance(row, Mapping):
            raise refusal
        if length is None:
            num_characters += len(str(row))
            if len(found) == MOST_ROWS or num_characters > MOST_CHARACTERS:
                said = "perhaps without an end; take some: itertools.islice(rows, 10_000)"
                raise ConfigError(f"{name}: over {len(found):,} rows, {said}")
        found.append(dict(row))
    return found


def plain(value: Any, of_pandas: bool = False) -> Any:
    """A value of a row as JSON has it, without keys that are null or NaN, at any depth.

    Tables write null where a row lacks what others have. What is neither numpy's nor a date, such
    as an image, stays. `of_pandas`: inside an array of objects, where whole numbers may be floats.
    Raises UnicodeEncodeError for half a character, which JSON can spell, and no tokenizer reads.
    """
    if isinstance(value, str):
        value.encode()
    if isinstance(value, Mapping):
        items = ((key, plain(item, of_pandas)) for key, item in value.items())
        return {key: item for key, item in items if not is_missing(item)}
    if type(value) in (list, tuple):
        return type(value)(plain(item, of_pandas) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "M":  # of nanoseconds it would be a number
            value = value.astype("datetime64[us]")
        return plain(value.tolist(), of_pandas or value.dtype.kind == "O")
    if of_pandas and isinstance(value, float) and value.is_integer():
        return int(value)
    return value.isoformat() if isinstance(value, date | time) else value


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def canonical(value: Any) -> Any:
    """A value whose texts lack what copies differ in: white space, and Unicode's forms."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, Mapping):
        return {key: canonical(item) for key, item in value.items()}
    return [canonical(item) for item in value] if isinstance(value, list | tuple) else value


def question_key(text: str) -> str:
    """A question without what copies of it differ in."""
    key: str = canonical(text)
    if not key:
        raise ValueError("the question is empty")
    return key


def whole_question(
    text: str, messages: Sequence[Record], tools: Sequence[Record] | None, variables: object
) -> str:
    """A text that tells a prompt from others. A plain one, or a user's message alone, is that text.

    `variables` are those of the chat template. What no template writes counts for nothing, such as
    the id of a message.
    """
    asked = []
    for message in messages or ({"role": "user", "content": text},):
        written = {key: message[key] for key in WRITTEN if message.get(key)}
        if calls := message.get("tool_calls"):
            functions = [call.get("function", call) for call in calls]
            written["tool_calls"] = [(x.get("name"), x.get("arguments")) for x in functions]
        asked.append(canonical(written))
    key = question_key(text)
    if asked == [{"role": "user", "content": key}] and not (tools or variables):
        return key
    return json.dumps([asked, canonical([tools, variables])], sort_keys=True, default=digest)


def text_of(record: Record, keys: Iterable[str], default: str | None = None) -> str:
    """The text or number under the first of the keys that a row has."""
    value = next((record[key] for key in keys if key in record), default)
    if not isinstance(value, str | Number):
        raise ValueError(f"needs a text or a number under {' or '.join(keys)}, got {value!r:.60}")
    return str(value)


def parse_pair(record: Record, needs_answer: bool = True) -> Row:
    """A question, or the messages of a chat, and an answer; all are used as they are.

    Messages stand under `prompt` and `completion` (TRL's form), or without a prompt under
    `messages` (OpenAI's). The last one, if it is the assistant's, is the answer; but at the end of
    a prompt it is the beginning of the answer. With `needs_answer`, a row without one is refused.
    """
    first = record.get("prompt") or record.get("messages")
    chats = [chat for chat in (first, record.get("completion")) if chat and is_chat(chat)]
    messages = [as_templates_write(message) for chat in chats for message in chat]
    default = None if needs_answer else ""
    if messages and messages[-1]["role"] == "assistant" and chats[-1] is not record.get("prompt"):
        default = messages.pop()["content"]
    text = question_of(messages) or text_of(record, QUESTIONS)
    keys = [key for key in ANSWERS if not is_chat(record.get(key))]
    if not needs_answer:  # nothing reads what is no text
        keys = [key for key in keys if isinstance(record.get(key), str | Number)]
    answer = text_of(record, keys, default)
    tools = tools_of(record)
    # the beginning of the answer asks nothing
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    question = whole_question(text, asked, tools, record.get("chat_template_kwargs"))
    example = Example(text, answer, messages=tuple(messages), fields=record, tools=tools)
    return Row(question, example, extra_key="".join(x["content"] for x in messages[len(asked) :]))


parse_any = partial(parse_pair, needs_answer=False)


def parse_episode(record: Record, *, is_read: bool, told: Collection[str] = ()) -> Row:
    """A row that needs no question.

    `told`: the keys that an environment's `reset` names, which belong to what is asked; `is_read`:
    an environment may read all of the row.
    """
    whole = json.dumps(record, sort_keys=True, default=digest)
    keys = {*QUESTIONS, "messages", "completion"}
    row = parse_any(record) if keys & record.keys() else Row(whole, Example("", fields=record))
    said = {key: record[key] for key in {*told} & record.keys() - keys}
    if said:
        text = json.dumps(canonical(said), sort_keys=True, default=digest)
        row = row._replace(question=f"{row.question} {text}")
    return row._replace(extra_key=whole) if is_read else row


def is_chat(value: object) -> TypeGuard[Sequence[Record]]:
    return isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)


def as_templates_write(message: Record) -> dict[str, Any]:
    """A message with a text where OpenAI's has parts or null, and objects where it has JSON."""
    written = dict(copy.deepcopy(message))
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    written["content"] = content
    for call in written.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    return written


def tools_of(record: Record) -> list[Record] | None:
    """The schemas of a row's own tools: a list, or the JSON of one. Anything else is none."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        tools = json.loads(tools)
    return list(tools) if is_chat(tools) else None


def tell_apart(*sides: list[Row]) -> Sequence[list[Row]]:
    """The rows of --data and --eval-data; where questions are few, with what else differs in them.

    All rows may ask the same, such as "Find the way out", and differ in what an environment reads,
    or in the beginning of the answer. Where there are questions enough, neither changes the split.
    """
    if len({row.question for rows in sides for row in rows}) >= 10:  # of fewer, a tenth may be none
        return sides
    return [[row._replace(question=row.question + row.extra_key) for row in rows] for rows in sides]


class Rows(Task):
    """The examples of files. An epoch visits every row once, in an order of its own."""

    def __init__(self, seed: int, data: Files, eval_data: Files, parse: Parse = parse_pair) -> None:
        """Without `data` there is nothing to train on. Raises ConfigError for an empty split."""
        self.seed = seed
        self.parse = parse

        rows, eval_rows = tell_apart(self.read(data), self.read(eval_data, "eval_data"))
        evaluated: dict[str, Example] = {}  # question -> its first row
        for row in eval_rows if eval_data else self.choose_held_out(rows):
            evaluated.setdefault(row.question, row.example)
        trained = [row for row in rows if row.question not in evaluated]
        self._train = [row.example for row in trained]
        self._held_out = list(evaluated.values())
        self._known = [  # without copies of what is evaluated
            row.example
            for row in (*rows, *eval_rows)
            if evaluated.get(row.question, row.example) is row.example
        ]
        self.num_train = len(trained)
        self.num_known = len(self._known)
        self.num_held_out = len(evaluated)
        self.about = f"{len(trained)} of {len(rows)} rows, {len(evaluated)} questions held out"
        num_copies = len(rows) + len(eval_rows) - len(trained) - len(evaluated)
        if num_copies:
            self.about += f"; {num_copies} more rows ask one of these, and are left out"
        if not evaluated or (data and not trained):
            raise ConfigError(f"--data: {self.about}; needs two questions, or --eval-data")
        self.questions = (_hashes(row.question for row in trained), _hashes(evaluated))

    def read(self, files: Files, argument: str = "data") -> list[Row]:
        """The rows of JSONL files, or of a caller's argument. Raises ConfigError for bad ones."""
        rows = []
        errors = list[str]()
        for source in files:
            place = f"{source}, line" if isinstance(source, Path) else f"{argument}, row"
            # as bytes: in a text, U+2028 would end a line too
            lines = source.read_bytes().splitlines() if isinstance(source, Path) else source
            for number, line in enumerate(lines, 1):
                if isinstance(line, bytes) and not line.strip():
                    continue
                # a line may hold anything
                with collecting(errors), refusing(f"{place} {number}"):
                    record = plain(json.loads(line) if isinstance(line, bytes) else line)
                    row = self.parse(record)
                    example = replace(row.example, place=f"{place} {number}")
                    rows.append(row._replace(question=question_key(row.question), example=example))
        refuse_rows(errors, len(rows) + len(errors))
        return rows

    def choose_held_out(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that are tests, else those of a tenth of the questions, or one row."""
        tests = [row for row in rows if row.is_test]
        if 0 < len(tests) < len(rows):  # else the files have one side of a published split
            return tests
        chosen = [row for row in rows if is_held_out(row.question)]
        return chosen or sorted(rows, key=lambda row: fingerprint(row.question))[:1]

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, self.num_train)
        order = permutation(self.seed, epoch, self.num_train)
        return replace(self._train[order[place]], index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)], index=number)

    def known(self, number: int) -> Example:
        """Example `number` of those that are used, in the order of the files."""
        return self._known[number]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return stream(seed, "pairs", epoch).permutation(n)


def _hashes(questions: Iterable[str]) -> np.ndarray:
    """`[n]` uint64, the sorted hashes of n different questions."""
    return np.unique(np.fromiter(map(fingerprint, questions), np.uint64))

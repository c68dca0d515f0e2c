"""Rows: how tables give them, and what they say: question, answer, what tells them apart."""

import copy
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from functools import partial
from itertools import islice
from math import isnan
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..identity import digest
from ..text.chat import INSTRUCTIONS
from ..types import ConfigError, Example

QUESTIONS = ("prompt", "question", "problem")  # keys of a question; the first with a text counts
ANSWERS = ("answer", "completion", "solution")  # keys of an answer, likewise

Record = Mapping[str, Any]  # a row as it was given


class Row(NamedTuple):
    question: str  # differs for rows that ask something else; the prompt may show less of it
    example: Example


Parse = Callable[[Any], Row]  # reads what a line holds; any exception refuses the line


def read_rows(setting: str, data: Any) -> list[Record]:
    """The rows of a table, or of any iterable of dicts. Raises ConfigError for other values."""
    rows = data
    if hasattr(data, "itertuples"):  # pandas
        # a column of whole numbers with a gap was read as floats
        gaps = [name for name in data if data[name].dtype.kind == "f" and data[name].isna().any()]
        table = data.assign(**data[gaps].convert_dtypes())
        # several values stand for a missing one
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
    elif hasattr(data, "to_dicts"):  # polars
        rows = data.to_dicts()
    elif hasattr(data, "to_pylist"):  # pyarrow
        rows = data.to_pylist()
    # iterating over an object with `__getitem__` alone, such as torch's Dataset, passes its length
    length = len(rows) if hasattr(rows, "__len__") else None
    records = list[Record]()
    for row in islice(rows, length):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{setting} must be files, or rows that are dicts, got {row!r:.60}")
        records.append(dict(row))
    return records


def as_json(value: Any, from_pandas: bool = False) -> Any:
    """A value of a row as JSON has it, without keys that are null or NaN, at any depth.

    Tables write null where a row lacks what others have. A value that is neither numpy's nor a
    date, such as an image, stays. `from_pandas` marks a value inside an array of objects, where
    whole numbers may be stored as floats. Raises UnicodeEncodeError for half a character, which
    JSON can spell and no tokenizer reads.
    """
    if isinstance(value, str):
        value.encode()
    if isinstance(value, Mapping):
        items = [(key, as_json(item, from_pandas)) for key, item in value.items()]
        return {key: item for key, item in items if not is_missing(item)}
    if type(value) in (list, tuple):
        return type(value)(as_json(item, from_pandas) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "M":  # `tolist` gives a number for nanoseconds
            value = value.astype("datetime64[us]")
        return as_json(value.tolist(), from_pandas or value.dtype.kind == "O")
    if from_pandas and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return value


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def canonical(value: Any) -> Any:
    """A value whose texts have single spaces and one Unicode form, so that copies are equal."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, Mapping):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return value


def whole_question(
    text: str,
    messages: Sequence[Record],
    tools: Sequence[Record] | None,
    variables: object,
) -> str:
    """A text that tells a prompt apart from others, with the `variables` of the chat template.

    The text is the prompt itself if it is plain, or the only message of a user.
    """
    plain_prompt = canonical([{"role": "user", "content": text}])
    asked = canonical(messages) or plain_prompt
    if asked == plain_prompt and not (tools or variables):
        return text
    return json.dumps([asked, canonical([tools, variables])], sort_keys=True, default=digest)


def text_field(record: Record, keys: Iterable[str], default: str | None = None) -> str:
    """The text or number under the first of the keys that has one."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, str | Number) and value != "":
            return str(value)
    if default is None:
        raise ValueError(f"needs a text or a number under {' or '.join(keys)}")
    return default


def parse_pair(record: Record, needs_answer: bool = True, needs_question: bool = True) -> Row:
    """Read a row with a question, or the messages of a chat, and an answer; all stay as they are.

    docs/tasks.md has the forms. A row without what it needs is refused.
    """
    # 1. The messages, without the answer if they have it.
    prompt = record.get("prompt") or record.get("messages")
    chats = [chat for chat in (prompt, record.get("completion")) if chat and is_chat(chat)]
    messages = [as_templates_write(message) for chat in chats for message in chat]
    default = None if needs_answer else ""
    if ends_in_answer(messages) and chats[-1] is not record.get("prompt"):
        last = messages.pop()
        if not {"tool_calls", "reasoning_content"} & last.keys():  # which the text leaves out
            default = last["content"]

    # 2. The answer, if the row has one as a text; other values are for reward functions.
    keys = ANSWERS[:1] if default else ANSWERS
    answer = text_field(record, keys, default)

    # 3. The question. The beginning of the answer does not belong to it.
    text = question_of(messages) or text_field(record, QUESTIONS, None if needs_question else "")
    tools = record.get("tools")
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        tools = json.loads(tools)
    tools = list(tools) if tools and is_chat(tools) else None  # a column may have another meaning
    asked = messages[:-1] if ends_in_answer(messages) else messages
    question = whole_question(text, asked, tools, record.get("chat_template_kwargs"))
    kind = text_field(record, ["kind"], "")
    example = Example(text, answer, kind=kind, messages=tuple(messages), fields=record, tools=tools)
    return Row(question, example)


parse_any = partial(parse_pair, needs_answer=False)


def parse_episode(record: Record) -> Row:
    """Read a row for an environment, which may read all of it, and may ask by itself."""
    whole = json.dumps(canonical(record), sort_keys=True, default=digest)
    asks = not record.keys().isdisjoint({*QUESTIONS, "messages", "completion"})
    return parse_any(record, needs_question=asks)._replace(question=whole)


def is_chat(value: object) -> TypeGuard[Sequence[Record]]:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def ends_in_answer(messages: Sequence[Record]) -> bool:
    """Whether the last message is the assistant's: an answer, or the beginning of one."""
    return bool(messages) and messages[-1]["role"] == "assistant"


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


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """The text that stands for messages in logs: the last one that the assistant answers, or "".

    Different prompts may have the same one; `whole_question` tells them apart.
    """
    others = (*INSTRUCTIONS, "assistant")
    asked = [message["content"] for message in messages if message["role"] not in others]
    return asked[-1] if asked else ""

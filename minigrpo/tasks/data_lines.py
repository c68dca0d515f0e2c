"""How the lines of a data file are read and checked, whatever the task makes of them.

A data file is UTF-8 text, with or without a byte order mark, one record per line. A record of a
`.jsonl` file is an object like `{"prompt": "...", "answer": "..."}`, or one with `messages`, a list
of `{"role": "user", "content": "..."}`, in place of the prompt. Rewards find all of its keys in
`example.fields`.
"""

import codecs
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from ..runtime.chat_messages import check_prompt_messages, question_of
from ..runtime.text import has_lone_surrogate, parse_json, short
from ..types import Example

MAX_NESTING = 100  # of the values in a line
FORM = 'must be an object like {"prompt": "...", "answer": "..."}'


class DataLine(NamedTuple):
    """A line that is not blank."""

    number: int  # the first line of a file is 1
    start: int  # the byte of the file at which its text begins
    raw: bytes  # with its line end


def data_lines(file: BinaryIO) -> Iterator[DataLine]:
    """Yield the lines of an open file that are not blank, without the byte order mark.

    Only a newline ends a line: U+2028 and U+0085, at which `str.splitlines` cuts too, may occur in
    a text.
    """
    start = 0
    for number, raw in enumerate(file, 1):
        mark = 0
        if number == 1:
            mark = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
        if raw[mark:].strip():
            yield DataLine(number, start + mark, raw[mark:])
        start += len(raw)


def decode_line(raw: bytes) -> str:
    """Return a line as text, without white space around it. Raises ValueError if it is not text."""
    text = raw.decode("utf-8").strip()  # UnicodeDecodeError is a ValueError
    if "\r" in text:
        raise ValueError("has a carriage return inside; lines must end with a newline")
    return text


def parse_example(text: str) -> Example:
    """Return the example of a JSON line. A key whose value is null counts as missing.

    Raises:
        ValueError: says what is wrong with the line, and what is allowed.
    """
    record = parse_record(text, FORM)
    prompt, messages = record.get("prompt"), record.get("messages")
    if prompt is None and messages is None:
        raise ValueError(f"{FORM}, has no prompt and no messages")
    if prompt is not None and messages is not None:
        raise ValueError("must have a prompt or messages, has both")
    if messages is None:
        _check_text("prompt", prompt)
    if "answer" not in record:
        raise ValueError(f"{FORM}, has no answer")
    _check_text("answer", record["answer"])
    if messages is not None:
        check_prompt_messages(messages)
        question, messages = question_of(messages), tuple(messages)
        return Example(question, record["answer"], messages=messages, fields=record)
    if not prompt:
        raise ValueError("prompt and answer must be text, and the prompt not empty")
    return Example(prompt, record["answer"], fields=record)


def parse_record(text: str, form: str) -> dict[str, Any]:
    """Return the object of a JSON line. Raises ValueError, which begins with `form`, if not one.

    Args:
        form: what a line must be, such as `must be an object like {"question": "..."}`.
    """
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{form} ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(form)
    _check_nesting(record, MAX_NESTING)
    return record


def _check_nesting(value: Any, levels: int) -> None:
    """Raise ValueError for a value that is nested too deeply to be copied for each example."""
    if not levels:
        raise ValueError(f"its brackets are nested more than {MAX_NESTING} deep")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_nesting(inner, levels - 1)


def _check_text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"prompt and answer must be text, {key} is {short(value)}")
    if has_lone_surrogate(value):
        raise ValueError(f"{key} has half of a surrogate pair, which is no character")

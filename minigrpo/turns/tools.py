"""Tools that a model may call: their schemas, the calls in a turn, and the results.

A model calls tools as Qwen, Llama or Mistral does, and reads the results before its next turn; a
turn that calls none is the last one.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import TypeAdapter, validate_call

from ..model.chat import Message

# Qwen's calls; the whole turn of Llama, perhaps after <|python_tag|>; Mistral's list of calls
CALL = re.compile(
    r'<tool_call>(.*?)</tool_call>|^(?:<\|python_tag\|>)?(\{.*"name".*\})$'
    r"|\[TOOL_CALLS\](.*)",
    re.DOTALL,
)
# in a docstring of Google's style, with its further lines
ARGUMENT = re.compile(r"^( +)(\w+)[^:\n]*:\s*(.+(?:\n\1 +.+)*)", re.MULTILINE)
# of all calls, which are answered in their order; Mistral wants nine characters
CALL_ID = "call00000"
SCHEMA_KEYS = ("type", "properties", "required", "$defs")  # what is kept of a JSON schema


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, by the name that it calls."""

    name: str
    function: Callable[..., Any]

    @cached_property
    def typed(self) -> Callable[..., Any]:
        """The function with types as annotations, also where the file has them as texts."""

        def call(*args: Any, **options: Any) -> Any:
            return self.function(*args, **options)

        call.__signature__ = inspect.signature(self.function)  # type: ignore[attr-defined]
        call.__annotations__ = get_type_hints(self.function, include_extras=True)
        return call

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it, from its type hints and its docstring."""
        about, _, rest = (inspect.getdoc(self.function) or "").partition("\nArgs:\n")
        section = re.split(r"\n(?=\S)", rest)[0]
        described = {name: text for _, name, text in ARGUMENT.findall(section)}
        whole = TypeAdapter[Any](self.typed).json_schema()  # type: ignore[arg-type]
        for name, argument in whole["properties"].items():
            argument.pop("title", None)
            if name in described:
                argument["description"] = " ".join(described[name].split())
        parameters = {key: whole[key] for key in SCHEMA_KEYS if key in whole}
        function = {"name": self.name, "description": about.strip(), "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result of a call; arguments are converted to the function's types, or refused."""
        result = validate_call(self.typed)(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


def calls_of(text: str) -> list[tuple[str, Any]]:
    """The tools that a turn calls outside its thoughts, by name, with their arguments."""
    calls: list[tuple[str, Any]] = []
    said = text.rpartition("</think>")[2].partition("<think>")[0].strip()
    for match in CALL.finditer(said):
        written = match[match.lastindex or 0]
        try:
            loaded = json.loads(written)
            for call in loaded if isinstance(loaded, list) else [loaded]:
                calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
        except (ValueError, LookupError, TypeError, AttributeError):
            calls.append((written, {}))  # the model reads that there is no such tool
    return calls


def result_of(tools: Mapping[str, Tool], name: str, arguments: Any) -> Message:
    """What a tool returns, as a message; an error is one too."""
    try:
        result = tools[name].call(arguments)
    except Exception as error:
        result = {"error": repr(error)}
    return {"role": "tool", "name": name, "content": str(result), "tool_call_id": CALL_ID}

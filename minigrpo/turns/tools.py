"""Tools that a model may call: their schemas, the calls in a turn, and the results."""

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from ..errors import ConfigError, error_text, refusing
from ..runtime.calls import finished
from ..text.chat import Message

# an argument in a docstring of Google's style, with its further lines
ARGUMENT = re.compile(r"^( +)(\w+)[^:\n]*:\s*(.+(?:\n\1 +.+)*)", re.MULTILINE)
# Every call has this id, because results are in the order of the calls. Mistral's templates require
# nine characters.
CALL_ID = "call00000"
SCHEMA_KEYS = ("type", "properties", "required", "$defs")  # keys of a JSON schema that are kept
TIMEOUT_S = 10.0  # default limit of a turn; an environment may have its own `timeout_s`
ToolCall = tuple[str, Any]  # the name of a tool and its arguments


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, by the name that it calls."""

    name: str
    function: Callable[..., Any]

    @classmethod
    def of(cls, given: Any) -> "Tool":
        """The tool of a function. Raises ConfigError for a value that a model cannot call."""
        if not inspect.isroutine(given) or not given.__name__.isidentifier():
            raise ConfigError(f"tool {given!r:.80}: give a function that was made by `def`")
        return cls(given.__name__, given)

    @cached_property
    def checked(self) -> Callable[..., Any]:
        """The function, which converts its arguments to the types of its annotations."""
        return validate_call(self.function)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it, from its type hints and its docstring."""
        about, _, rest = (inspect.getdoc(self.function) or "").partition("\nArgs:\n")
        if not about:
            missing = "has no docstring, which tells the model what it does"
            warnings.warn(f"tool {self.name}: {missing}", stacklevel=2)
        section = re.split(r"\n(?=\S)", rest)[0]
        described = {name: text for _, name, text in ARGUMENT.findall(section)}
        with refusing(f"tool {self.name}"):
            whole = TypeAdapter[Any](self.checked).json_schema()  # type: ignore[arg-type]
            properties = whole["properties"]  # missing if arguments have no names: (a, /), (*a)
        for name, argument in properties.items():
            argument.pop("title", None)
            if name in described:
                argument["description"] = " ".join(described[name].split())
        parameters = {key: whole[key] for key in SCHEMA_KEYS if key in whole}
        function = {"name": self.name, "description": about.strip(), "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> Any:
        """The result of a call. Arguments are converted to the function's types, or refused.

        A text is read as JSON where no text is expected: some forms of calls have only texts.
        """
        properties = self.schema["function"]["parameters"]["properties"]
        read = dict(arguments)
        for name, value in arguments.items():
            schema = properties.get(name, {})
            types = {each.get("type") for each in (schema, *schema.get("anyOf", ()))}
            expects = schema.keys() - {"description", "default"}
            if isinstance(value, str) and expects and "string" not in types:
                with suppress(ValueError):
                    read[name] = json.loads(value)
        return finished(self.checked(**read), timeout_s)


@dataclass(frozen=True)
class CallForm:
    """A form in which chat templates write calls: JSON between two regular expressions."""

    begin: str
    end: str

    def find(self, text: str) -> list[ToolCall]:
        """The calls in a turn, outside its thoughts. Marks inside a call do not count."""
        mark = re.compile(rf"<think>|</think>|{self.begin}\s*", re.DOTALL)
        calls: list[ToolCall] = []
        place = 0
        while found := mark.search(text, place):
            place = found.end()
            if found[0] == "<think>":
                end = text.find("</think>", place)
                place = end + len("</think>") if end >= 0 else len(text)
            elif found[0] == "</think>":  # the prompt began this thought
                calls.clear()
            else:
                new, place = self._read(text, place)
                calls += new
        return calls

    def _read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """The calls that begin at a place, and the place where they end."""
        with suppress(ValueError, RecursionError):
            loaded, stop = json.JSONDecoder().raw_decode(text, start)
            closing = re.compile(rf"\s*{self.end}").match(text, stop)
            if closing:
                entries = loaded if isinstance(loaded, list) else [loaded]
                return [_call(each) for each in entries], closing.end()
        # An unreadable call counts if it ends. The model is told that there is no such tool.
        closing = re.compile(self.end).search(text, start)
        if not closing:
            return [], start
        written = re.split("</?think>", text[start : closing.start()])[0]
        return [(written.strip(), {})], start + len(written)


@dataclass(frozen=True)
class TaggedForm(CallForm):
    """Qwen3.5's form: the name of the tool and each argument, as a text, in tags of their own."""

    def _read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        name, _, _ = text[start:].partition(">")
        place = start + len(name) + 1
        arguments = {}
        while begun := re.compile(r"\s*<parameter=([^>\n]+)>\n?").match(text, place):
            value, closing, _ = text[begun.end() :].partition("</parameter>")
            arguments[begun[1]] = value.removesuffix("\n")
            place = begun.end() + len(value + closing)
        ended = re.compile(rf"\s*</function>\s*{self.end}").match(text, place)
        return ([(name, arguments)], ended.end()) if ended else super()._read(text, start)


def _call(entry: Any) -> ToolCall:
    """The call in an entry of JSON. An entry without a name calls a tool named by its own text."""
    if isinstance(entry, dict) and "name" in entry:
        return entry["name"], entry.get("arguments", entry.get("parameters", {}))
    return json.dumps(entry), {}


FORMS = (
    TaggedForm(r"<tool_call>\s*<function=", "</tool_call>"),
    CallForm("<tool_call>", "</tool_call>"),  # Qwen's
    CallForm(r"\[TOOL_CALLS\]", r"\Z"),  # Mistral's, a list of calls
    CallForm(  # Llama's, an object that is the whole turn after its thoughts
        r"(?:\A|(?<=</think>))\s*(?:<\|python_tag\|>\s*)?"
        r'(?=\{.*\}\s*\Z)(?=.*"name")(?=.*"parameters")',
        r"\Z",
    ),
)


def calls_of(text: str, form: CallForm | None = None) -> list[ToolCall]:
    """The tools that a turn calls outside its thoughts, by name, with their arguments.

    `form` is the form of the chat template. Without it, the first form that finds calls counts.
    """
    for each in [form] if form else FORMS:
        calls = each.find(text)
        if calls:
            return calls
    return []


@dataclass(frozen=True)
class Result:
    name: str  # the name that was called
    content: str  # the text that the model reads
    has_failed: bool = False
    error: BaseException | None = None  # the error that the tool raised

    @property
    def message(self) -> Message:
        message = {"role": "tool", "name": self.name, "content": self.content}
        return {**message, "tool_call_id": CALL_ID}


def result_of(
    tools: Mapping[str, Tool],
    name: str,
    arguments: Any,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Call a tool. If the call is wrong, the result says why in a sentence."""
    if name not in [*tools]:  # a name may be any JSON
        there = f"; there are: {', '.join(tools)}" if tools else ""
        return Result(name, f"There is no tool named {name!s:.80}{there}.", has_failed=True)
    if not isinstance(arguments, Mapping):
        needed = "its arguments must be an object with their names"
        return Result(name, f"{name} did not work: {needed}.", has_failed=True)
    try:
        return Result(name, str(tools[name].call(arguments, timeout_s)))
    except ValidationError as error:
        # The errors, by place, without contents that differ between runs.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        findings = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors]
        return Result(name, f"{name} did not work: {'; '.join(findings)}", has_failed=True)
    except BaseException as error:  # sys.exit() too
        content = f"{name} did not work: {error_text(error)}"
        return Result(name, content, has_failed=True, error=error)

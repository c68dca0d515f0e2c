"""Render messages with a model's own chat template, and encode the result.

A template is a jinja2 text that comes with a model and writes the control tokens: who speaks, where
a turn ends. Control tokens are encoded where the template wrote them, never where a message spells
them: a prompt that contains `<|im_end|>` stays text, and cannot end its own turn.

To tell the two apart, a mark that occurs nowhere else is put into what a message spells like a
control token, before the template runs. Marks are removed from the rendered text once it is split
at control tokens. So templates may trim, cut or test a message as they like.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Protocol, TypeVar

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..runtime.chat_messages import INSTRUCTIONS, Message, check_messages, with_system

Result = TypeVar("Result")
Option = bool | float | None  # of a template, such as enable_thinking of Qwen3
# Templates may write today's date. It is fixed, or the same prompt would change from day to day.
# This is the date that Llama 3.2's template falls back to.
TODAY = datetime(2024, 7, 26)
PUNCTUATION = re.compile(r"[^\w\s]")
PROBE = "qxzj"  # a word that is looked for in what a template writes
ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")  # how Python shows an object that is no text
# Unicode keeps these free for use inside programs. Data may hold them all the same, so a mark is
# one that the messages and the template do not have.
MARKS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE))]


class SpecialTokens(Protocol):
    """What a template needs of a tokenizer."""

    @property
    def special(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. Raises ValueError, in one line, if it is not valid jinja2."""

    source: str
    name: str = "the chat template"  # for errors
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... -> special
    system: str = ""  # a system message for messages without one
    # sequences of roles with which it was found to write the messages that matter
    checked: set[tuple[str, ...]] = field(
        default_factory=set, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError(f"{self.name}: is empty")
        self._run(lambda: _compiled(self.source))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Option
    ) -> str:
        """Return the text of a prompt, to look at.

        Args:
            messages: role and content of each, both texts.
            add_generation_prompt: end where the assistant's answer begins.
            options: of the template, such as enable_thinking of Qwen3.

        Raises:
            ValueError: in one line, for messages that are not of this form, or if the template
                refuses them.
        """
        check_messages(messages)
        return self._run(
            lambda: _compiled(self.source).render(
                messages=[dict(message) for message in with_system(messages, self.system)],
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.tokens, **options},
            )
        )

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: SpecialTokens,
        *,
        add_generation_prompt: bool = True,
        **options: Option,
    ) -> list[int]:
        """Return the tokens of a prompt. Arguments and errors as for `render`.

        Raises ValueError also if the template works differently on marked messages, or leaves out
        one that matters.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **options)
        messages = with_system(messages, self.system)
        self._check_that_it_writes(messages)
        data = "".join(message["content"] for message in messages)
        mark = next(mark for mark in MARKS if mark not in data and mark not in self.source)
        shield = _Shield.of(tuple(tokenizer.special))
        marked = [{**m, "content": shield.mark(m["content"], mark)} for m in messages]
        wrong = ValueError(
            f"{self.name}: works differently on messages that spell special tokens; "
            "remove them from the data"
        )
        plain = text
        if any(mark in message["content"] for message in marked):
            text = self.render(marked, add_generation_prompt=add_generation_prompt, **options)
            if text.replace(mark, "") != plain:
                raise wrong
        # A template that deletes or changes characters may make a special token of a message. Then
        # other marks break it, and the special tokens are not those of before.
        for pattern in (shield.first, PUNCTUATION):
            apart = [{**m, "content": pattern.sub(rf"\g<0>{mark}", m["content"])} for m in marked]
            if apart == marked:
                continue
            checked = self.render(apart, add_generation_prompt=add_generation_prompt, **options)
            same = checked.replace(mark, "") == plain
            if same and shield.pattern.findall(checked) != shield.pattern.findall(text):
                raise wrong
        ids = list[int]()
        for number, part in enumerate(shield.pattern.split(text)):
            if number % 2:  # split returns what matched between what did not
                ids.append(tokenizer.special[part])
            elif part:
                ids += tokenizer.encode(part.replace(mark, ""))
        return ids

    def _check_that_it_writes(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if the last message, or one with instructions, is left out.

        Prompts with different questions would be equal, or a system message would do nothing.
        Once for each sequence of roles.
        """
        roles = tuple(message["role"] for message in messages)
        if roles in self.checked:
            return
        written = self.render(messages)
        if (found := ADDRESS.search(written)) and not ADDRESS.search(str(messages)):
            raise ValueError(f"{self.name}: writes {found[0]}, which is no text")
        for number, message in reversed([*enumerate(messages)]):  # the question first
            if number < len(messages) - 1 and message["role"] not in INSTRUCTIONS:
                continue
            other = {**message, "content": f"{PROBE} {message['content']} {PROBE}"}
            try:
                text = self.render([*messages[:number], other, *messages[number + 1 :]])
            except ValueError:  # it reads the message
                continue
            if text.casefold().count(PROBE) <= written.casefold().count(PROBE):
                raise ValueError(f"{self.name}: leaves out messages of the role {message['role']}")
        self.checked.add(roles)

    def turn_end(self, special: Sequence[str]) -> str | None:
        """The special token that the template writes after an assistant's answer, if any."""
        answer = "An answer that no template has."
        dialogue = [{"role": "user", "content": "A"}, {"role": "assistant", "content": answer}]
        for before in ([], [{"role": "system", "content": "A"}]):  # some ask for one
            try:
                text = self.render([*before, *dialogue], add_generation_prompt=False)
            except ValueError:
                continue
            _, found, rest = text.rpartition(answer)
            after = _Shield.of(tuple(special)).pattern.match(rest.lstrip())
            return after[0] if found and after else None
        return None

    def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Exception as error:  # a template is a program: it raises whatever it likes
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            words = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self.name}{line}: {words}") from None


@dataclass(frozen=True)
class _Shield:
    """Puts marks into a text so that no part of it is read as a special token."""

    pattern: re.Pattern[str]  # any special token, the longest first
    first: re.Pattern[str]  # a character with which one may begin
    special: tuple[str, ...]
    starts: tuple[str, ...]  # parts of special tokens that a text may end with
    ends: tuple[str, ...]  # and those that a text may begin with

    @staticmethod
    @cache
    def of(special: tuple[str, ...]) -> "_Shield":
        names = sorted(special, key=len, reverse=True)
        return _Shield(
            re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})"),
            re.compile("|".join(sorted({re.escape(name[0]) for name in names})) or "(?!)"),
            special,
            tuple({name[:size] for name in special for size in range(1, len(name))}),
            tuple({name[size:] for name in special for size in range(1, len(name))}),
        )

    def mark(self, text: str, mark: str) -> str:
        """The text with a mark after each character of what spells a special token.

        Also at its ends, where they could become a special token together with the template's
        text, as the message `im_end` in a template that writes `<|` before and `|>` after it. White
        space at the ends stays outside, because templates trim it.
        """
        body = text.strip()
        if not body:
            return text
        marked = self.pattern.sub(lambda found: mark.join(found[0]) + mark, body)
        inside = any(body in name for name in self.special)
        if inside or body.startswith(self.ends):
            marked = mark + marked
        if inside or body.endswith(self.starts):
            marked += mark
        return text.replace(body, marked, 1)


# --- jinja2, set up as transformers does ----------------------------------------------------------


class _Generation(Extension):
    """The block `{% generation %}`, which marks what an assistant wrote: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    # A random choice would write the same prompt in another way each time.
    del environment.filters["random"], environment.globals["lipsum"]
    return environment.from_string(source)

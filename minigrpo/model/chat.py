"""Chat: write a prompt from messages with a model's own chat template.

A template is a jinja2 text that comes with a model and writes the control tokens: who speaks, where
a turn ends. A message that spells such a token is refused: it could end its own turn.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, refusing

Message = Mapping[str, Any]  # role, content, and what else the template knows
Tool = Mapping[str, Any]  # the JSON schema of what the model may call
# Templates may write today's date. It is fixed, or the same prompt would change from day to day.
TODAY = datetime(2024, 7, 26)
INSTRUCTIONS = ("system", "developer")  # roles that say how to answer, not what
PROBE = "qxzj"  # a word that is looked for in what a template writes
TURN = [{"role": "user", "content": "A"}, {"role": "assistant", "content": PROBE}]
# {% generation %} ... {% endgeneration %} marks what an assistant wrote; it changes no text
GENERATION = re.compile(r"(?<={%)([-+]?\s*)(end)?generation\b")


@dataclass(eq=False)
class Chat:
    """A chat template, and the system message of --system."""

    source: str
    name: str = "the chat template"  # in errors
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    special: Collection[str] = ()  # tokens that only the template may write
    system: str = ""  # for messages without a system message

    def __post_init__(self) -> None:
        """Set jinja2 up as transformers does. Raises ConfigError for bad jinja2."""
        # sequences of roles of which the template was found to write the messages that matter
        self.checked = set[tuple[str, ...]]()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # jinja2's own filter escapes HTML
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = TODAY.strftime
        with refusing(self.name):
            self.template = environment.from_string(GENERATION.sub(_plain_block, self.source))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of messages, up to where the assistant's answer begins."""
        with refusing(self.name):  # a template is a program: it raises whatever it likes
            return self.template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text of a prompt. Raises ConfigError for messages that the template cannot write."""
        if self.system and not {message["role"] for message in messages} & {*INSTRUCTIONS}:
            messages = [{"role": "system", "content": self.system}, *messages]
        self._check(messages)
        text = self.render(messages, tools)
        if tools and text == self.render(messages):
            raise ConfigError(f"{self.name}: leaves out tools")
        return text

    def between(self, answers: Sequence[Message]) -> str:
        """What the template writes from the end of an assistant's turn to its next one.

        `answers`: of a user, or of tools. The text is read off a dialogue that is always the same.
        So it does not depend on earlier turns, which stay as they were sampled even where the
        template would write them differently (Qwen3's drops earlier reasoning).
        """
        dialogue = [*TURN, *answers]
        self._check(dialogue)
        return self.render(dialogue).partition(PROBE)[2].lstrip().removeprefix(self.turn_end)

    def _check(self, messages: Sequence[Message]) -> None:
        """Raise ConfigError for a special token in a message, or messages that are left out.

        The former could end its own turn. Without the last message, or one with instructions,
        prompts with different questions would be equal, or a system message would do nothing.
        """
        data = json.dumps(messages, ensure_ascii=False)
        for token in self.special:
            if token in data:
                raise ConfigError(f"a message has the special token {token}: remove it")
        roles = tuple(message["role"] for message in messages)
        if roles in self.checked:
            return
        probes = [{**message, "content": f"{PROBE}{n}."} for n, message in enumerate(messages)]
        text = self.render(probes)
        for probe in probes:
            matters = probe["role"] in INSTRUCTIONS or probe is probes[-1]
            if matters and probe["content"] not in text:
                raise ConfigError(f"{self.name}: leaves out messages of {probe['role']}")
        self.checked.add(roles)

    @cached_property
    def turn_end(self) -> str:
        """The special token that the template writes after an assistant's answer, or ""."""
        text = self.render(TURN, add_generation_prompt=False)
        rest = text.partition(PROBE)[2].lstrip()
        return max(filter(rest.startswith, self.special), key=len, default="")


def _plain_block(mark: re.Match[str]) -> str:
    """A block that jinja2 knows in place of `generation` or `endgeneration`."""
    return mark[1] + ("endif" if mark[2] else "if true")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

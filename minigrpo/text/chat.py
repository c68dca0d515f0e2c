"""Chat: write a prompt from messages with a model's own chat template.

A template is a jinja2 text that comes with a model. It writes the control tokens, which say who
speaks and where a turn ends. A message that spells such a token is refused, because it could end
its own turn.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, refusing

Message = Mapping[str, Any]  # role, content, and whatever else the template knows
Schema = Mapping[str, Any]  # the JSON schema of a function that the model may call
# Templates may write today's date. It is fixed, or the same prompt would change from day to day.
TODAY = datetime(2024, 7, 26)
INSTRUCTIONS = ("system", "developer")  # roles that say how to answer, not what
OWN = {"messages", "tools", "add_generation_prompt"}  # variables that no setting changes
PROBE = "qxzj"  # a word that marks a place in the text of a template
TURN = [{"role": "user", "content": "A"}, {"role": "assistant", "content": PROBE}]
# {% generation %} ... {% endgeneration %} marks the assistant's text and does not change it
PLAIN_BLOCKS = {"generation": "if true", "endgeneration": "endif"}


@dataclass(eq=False)
class Chat:
    """A chat template, and the system message of --system."""

    source: str
    name: str = "the chat template"  # the template's name in errors
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    special: Collection[str] = ()  # tokens that only the template may write
    system: str = ""  # for messages without a system message
    args: Mapping[str, Any] = field(default_factory=dict)  # the variables of --chat-args

    def __post_init__(self) -> None:
        """Set jinja2 up as transformers does. Raises ConfigError for bad jinja2."""
        # roles and variables for which `_check` has found that the template writes the messages
        self.checked = set[tuple[str, ...]]()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # the filter of jinja2 would escape HTML
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = TODAY.strftime
        with refusing(self.name):
            source = self.source
            for block, plain in PLAIN_BLOCKS.items():
                source = re.sub(rf"(?<={{%)([-+]?\s*){block}\b", rf"\1{plain}", source)
            self.template = environment.from_string(source)
            self.variables = meta.find_undeclared_variables(environment.parse(source)) - OWN

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        args: Mapping[str, Any] = {},
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of messages, up to where the assistant's answer begins."""
        variables = {"documents": None, **self.tokens, **self.args, **args}
        with refusing(self.name):  # a template is a program, and may raise any error
            return self.template.render(
                variables,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        args: Mapping[str, Any] = {},
    ) -> str:
        """The text of a prompt. Raises ConfigError for messages that the template cannot write."""
        has_instructions = any(message["role"] in INSTRUCTIONS for message in messages)
        if self.system and not has_instructions:
            messages = [{"role": "system", "content": self.system}, *messages]
        self._check(messages, tools, args)
        text = self._open(messages, tools, args)
        if tools and text == self._open(messages, (), args):
            raise ConfigError(f"{self.name} leaves out the tools: choose one that writes them")
        return text

    def _open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        args: Any,
    ) -> str:
        """The text up to where the policy continues, perhaps within a message of the assistant."""
        *before, last = messages
        if last["role"] != "assistant":
            return self.render(messages, tools, args)
        if last.get("tool_calls"):
            raise ConfigError("the last message calls a tool: add the tool's result after it")
        marked = {**last, "content": f"{last['content']}{PROBE} "}
        whole = self.render([*before, marked], tools, args, add_generation_prompt=False)
        text, _, rest = whole.rpartition(PROBE)
        if "".join(last["content"].split()) not in "".join(text.split()):
            raise ConfigError(f"{self.name} leaves out the beginning of the answer")
        trims_contents = not rest.startswith(" ")
        return text.rstrip() if trims_contents else text

    def between(self, answers: Sequence[Message], args: Mapping[str, Any] = {}) -> str:
        """The text of the template from the end of an assistant's turn to its next one.

        It begins with the token that ends the turn, perhaps after white space. The dialogue before
        the answers of a user or of tools is always the same, so earlier turns stay as they were
        sampled, even if the template would change them (Qwen3's does).
        """
        dialogue = [*TURN, *answers]
        self._check(dialogue, (), args)
        return self.render(dialogue, args=args).partition(PROBE)[2]

    def _check(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        args: Mapping[str, Any],
    ) -> None:
        contents = {"message": messages, "tool": tools, "template variable": args}
        for part, content in contents.items():
            text = json.dumps(content, ensure_ascii=False, default=str)
            for token in self.special:
                if token in text:
                    raise ConfigError(f"a {part} has the special token {token}: remove it")
        roles = [message["role"] for message in messages]
        case = (*roles, str(args))
        if case in self.checked:
            return
        probes = [{**message, "content": f"{PROBE}{n}."} for n, message in enumerate(messages)]
        text = self._open(probes, (), args)
        for probe in probes:
            matters = probe["role"] in INSTRUCTIONS or probe is probes[-1]
            if matters and probe["content"] not in text:
                raise ConfigError(f"{self.name} leaves out messages of the role {probe['role']}")
        self.checked.add(case)

    @cached_property
    def turn_end(self) -> str:
        """The special token that the template writes after an assistant's answer, or ""."""
        text = self.render(TURN, add_generation_prompt=False)
        rest = text.partition(PROBE)[2].lstrip()
        found = [token for token in self.special if rest.startswith(token)]
        return max(found, key=len, default="")


def extended(messages: Sequence[Message], text: str) -> list[Message]:
    """Copy messages and add a text to the last one that is not the assistant's."""
    place = max(n for n, message in enumerate(messages) if message["role"] != "assistant")
    asking = messages[place]
    longer = {**asking, "content": asking["content"] + text}
    return [*messages[:place], longer, *messages[place + 1 :]]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

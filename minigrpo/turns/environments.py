"""Environments that answer turns, and a task whose prompts begin in one.

The interface is TRL's, by the names of methods alone, so there is no base class:

    class Environment:                  an instance for each completion
        reset(self, **row)              may return what the user says first, or more of it
        any_public_method(self, x: int) a tool, if there is no step
        step(self, text)                a game: (observation, reward, done), or Gymnasium's five
        get_reward(self)                optional: the reward at the end, of a game else the sum

`reset` gets the keys of a data row that its signature names, and `seed`. It must say the same to
all completions of a prompt, because they start alike. Plain functions are tools too.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import refusing
from ..model.chat import Tool as Schema
from ..model.chat import extended
from ..runtime.rng import stream
from ..task import Task
from ..tasks.base import ChangedTask
from ..types import ConfigError, Example
from ..userfiles import load_name
from .tools import Tool

NOT_TOOLS = ("reset", "step", "get_reward")  # public methods that the model cannot call


class ToolsAlone:
    """The environment of a run that has only functions as tools."""

    def reset(self) -> None: ...


def is_game(environment: Any) -> bool:
    """Whether an environment, or its class, answers by `step`, and has no tools."""
    return hasattr(environment, "step")


@dataclass(frozen=True)
class EnvironmentSet:
    classes: Mapping[str, type[Any]]  # by the name that a row's `environment` gives
    tools: Mapping[str, Tool]  # of all environments but games

    @classmethod
    def of(
        cls,
        environment: type[Any] | Mapping[str, type[Any]] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> "EnvironmentSet":
        """A class, or several by name, and functions."""
        if isinstance(environment, Mapping):
            classes = dict(environment)
        else:
            kind = environment or ToolsAlone
            classes = {getattr(kind, "__name__", ""): kind}
        return cls(classes, {tool.__name__: Tool(tool.__name__, tool) for tool in tools})

    @classmethod
    def load(cls, setting: str, tools: Sequence[Callable[..., Any]] = ()) -> "EnvironmentSet":
        """The classes and functions of FILE.py:NAME,FILE.py:NAME. A file is run: trust it."""
        named = [load_name("--environment", name) for name in setting.split(",")]
        classes = {value.__name__: value for value in named if isinstance(value, type)}
        functions = [value for value in named if not isinstance(value, type)]
        return cls.of(classes or None, [*tools, *functions])

    @cached_property
    def parts(self) -> dict[str, float]:
        """The environments that give a reward, by the name of their class, and its weight."""
        return {
            kind.__name__: 1.0
            for kind in self.classes.values()
            if is_game(kind) or hasattr(kind, "get_reward")
        }

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """Its public methods, and the tools of the run. A game has none."""
        if is_game(environment):
            return {}
        members = inspect.getmembers(type(environment), inspect.isfunction)
        names = [name for name, _ in members if name[0] != "_" and name not in NOT_TOOLS]
        return {**{name: Tool(name, getattr(environment, name)) for name in names}, **self.tools}

    def class_of(self, example: Example) -> type[Any]:
        name = example.fields.get("environment", next(iter(self.classes)))
        if name not in self.classes:
            raise ConfigError(f"{example.label}: environment {name!r} is none of {[*self.classes]}")
        return self.classes[name]


def reset(environment: Any, example: Example) -> str:
    """What an environment says first; of Gymnasium's (observation, info) the former."""
    row = arguments_of(inspect.signature(environment.reset), example)
    said = environment.reset(**copy.deepcopy(row)) or ""  # an episode may empty a list in it
    return str(said[0]) if isinstance(said, tuple) else said


def arguments_of(reset: inspect.Signature, example: Example) -> Mapping[str, Any]:
    """The keys of a row that `reset` takes."""
    named = reset.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return example.fields
    return {name: value for name, value in example.fields.items() if name in named}


class TurnTask(ChangedTask):
    """A task whose prompts end with what the environment says first, and name the tools."""

    def __init__(self, source: Task, environments: EnvironmentSet, seed: int) -> None:
        super().__init__(source)
        self.environments = environments
        self.seed = seed

    def ask(self, example: Example, number: int, split: str) -> Example:
        seed = int(stream(self.seed, f"environment/{split}", number).integers(2**31))
        example = replace(example, fields={"seed": seed, **example.fields})
        environment = self.environments.class_of(example)()
        said = reset(environment, example)
        messages = extended(example.messages, said) if example.messages else []
        if not messages:
            example = replace(example, prompt=example.prompt + said)
        tools = self.environments.tools_of(environment).values()
        schemas = [*(example.tools or ()), *(tool.schema for tool in tools)]
        return replace(example, messages=messages, tools=schemas)

    def known(self, number: int) -> Example:
        """A row as it is asked, but for what its environment says first: to reset may take long."""
        example = self.source.known(number)
        example = replace(example, fields={"seed": 0, **example.fields})
        reset, schemas = self.described[self.environments.class_of(example)]
        with refusing(example.label):
            reset.bind(**arguments_of(reset, example))
        return replace(example, tools=[*(example.tools or ()), *schemas])

    @cached_property
    def described(self) -> Mapping[type[Any], tuple[inspect.Signature, Sequence[Schema]]]:
        """What the `reset` of each environment takes, and the schemas of its tools."""
        described = {}
        for kind in self.environments.classes.values():
            environment = kind()
            tools = self.environments.tools_of(environment).values()
            schemas = [tool.schema for tool in tools]
            described[kind] = (inspect.signature(environment.reset), schemas)
        return described

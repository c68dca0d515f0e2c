"""Environments that answer turns, and a task whose prompts begin in one.

The interface is TRL's, by the names of methods alone, so there is no base class: `reset`, then
either `step` (a game) or public methods that are tools, and perhaps `get_reward` and `close`.
docs/turns.md says what each does. A callable that makes environments may stand for their class.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..errors import refusing
from ..guard import RunFailed
from ..rng import stream
from ..runtime.pool import called, finished
from ..task import Task
from ..tasks.base import WrappedTask
from ..text.chat import Tool as Schema
from ..text.chat import extended
from ..types import ConfigError, Example
from ..userfiles import failure, load_name
from .tools import TIMEOUT_S, Tool

# public methods that the model cannot call
NOT_TOOLS = ("reset", "step", "get_reward", "close")


class ToolsAlone:
    """The environment of a run whose tools are plain functions."""

    def reset(self) -> None: ...


@dataclass(eq=False)
class Session:
    """The environment of one completion or prompt, made when it is needed.

    It is closed even if a call that took too long is still running in it, because closing often
    ends such a call. Only one that takes too long to make is not closed.
    """

    make: Callable[[], Any]
    timeout_s: float  # limit of a call
    environment: Any = None

    def begin(self) -> Any:
        """Make the environment."""
        self.environment = finished(self.make(), self.timeout_s)
        return self.environment

    def reset(self, example: Example) -> str:
        """Make the environment and reset it; return its first observation as a text."""
        environment = self.begin()
        row = copy.deepcopy(arguments_of(environment, example))  # an episode may change its row
        return as_text(finished(environment.reset(**row), self.timeout_s))

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            finished(self.environment.close(), self.timeout_s)


def is_game(environment: Any) -> bool:
    """Whether an environment answers by `step`, and so has no tools."""
    return hasattr(environment, "step")


@dataclass(frozen=True)
class EnvironmentSpec:
    """A class of environments, or another callable, which makes one for each completion."""

    make: Callable[[], Any]
    shown: Any = field(compare=False)  # an environment that was made and closed, for its methods
    timeout_s: float  # limit of a call

    @classmethod
    def of(cls, given: Any) -> "EnvironmentSpec":
        """The spec of a class, or of a callable that makes environments. Raises ConfigError."""
        with refusing(f"environment {getattr(given, '__name__', given)!s:.80}"):
            session = Session(given, TIMEOUT_S)
            shown = session.begin()
            timeout_s = float(getattr(shown, "timeout_s", TIMEOUT_S))
            session.close()
            return cls(given, shown, timeout_s)

    @property
    def name(self) -> str:
        """The name of the class, which is also the name of its reward."""
        return type(self.shown).__name__


def by_name(what: str, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by their names. Raises ConfigError if two values have the same name."""
    found: dict[str, Any] = {}
    for name, value in named:
        if found.setdefault(name, value) != value:
            raise ConfigError(f"two {what} have the name {name}: rename one")
    return found


@dataclass(frozen=True)
class EnvironmentSet:
    specs: Mapping[str, EnvironmentSpec]  # by the name that a row's `environment` gives
    tools: Mapping[str, Tool]  # the functions, which every environment but a game offers

    @classmethod
    def of(cls, environment: Any = None, tools: Any = ()) -> "EnvironmentSet":
        """The set of one class or callable, or of several by name, and of functions as tools."""
        if isinstance(environment, Mapping):
            specs = {name: EnvironmentSpec.of(given) for name, given in environment.items()}
        else:
            spec = EnvironmentSpec.of(ToolsAlone if environment is None else environment)
            specs = {spec.name: spec}
        by_name("environments", [(spec.name, type(spec.shown)) for spec in specs.values()])
        functions = [tools] if callable(tools) else tools
        function_tools = [Tool.of(function) for function in functions]
        environments = cls(specs, by_name("tools", [(tool.name, tool) for tool in function_tools]))
        for spec in specs.values():
            environments.tools_of(spec.shown)  # raises an error for two tools of one name
        return environments

    @classmethod
    def load(cls, setting: str) -> "EnvironmentSet":
        """The classes and functions of FILE.py:NAME,FILE.py:NAME. A file is run: trust it."""
        named = [load_name("--environment", name) for name in setting.split(",")]
        classes = [(value.__name__, value) for value in named if isinstance(value, type)]
        functions = [value for value in named if not isinstance(value, type)]
        return cls.of(by_name("environments", classes) or None, functions)

    @cached_property
    def reward_weights(self) -> dict[str, float]:
        """The weights of the environments' rewards, by the names of their classes."""
        return {
            spec.name: 1.0
            for spec in self.specs.values()
            if is_game(spec.shown) or hasattr(spec.shown, "get_reward")
        }

    @property
    def reads_rows(self) -> bool:
        """Whether there is an environment, which may read all of a row and ask by itself."""
        return not any(isinstance(spec.shown, ToolsAlone) for spec in self.specs.values())

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """An environment's public methods, and the tools of the run. A game has none."""
        if is_game(environment):
            return {}
        methods = inspect.getmembers(type(environment), inspect.isroutine)
        names = [name for name, _ in methods if name[0] != "_" and name not in NOT_TOOLS]
        own = [(name, Tool(name, getattr(environment, name))) for name in names]
        return by_name("tools", [*own, *self.tools.items()])

    def spec_of(self, example: Example) -> EnvironmentSpec:
        """The spec that a row's `environment` names, else the first."""
        name = example.fields.get("environment", next(iter(self.specs)))
        return self.specs[name]


def as_text(observation: Any) -> str:
    """The text of a result of `reset` or `step`. Raises ConfigError if it has none.

    Of Gymnasium's (observation, info) the model reads the former, of a message's parts their texts,
    and of numbers and arrays the text that Python writes.
    """
    if isinstance(observation, tuple) and len(observation) == 2:
        first, info = observation
        if isinstance(info, Mapping | None):
            return as_text(first)
    pieces = observation if isinstance(observation, list) else [observation]
    contents = [piece for piece in pieces if isinstance(piece, Mapping)]
    if contents == pieces and all(content.get("type") == "text" for content in contents):
        return "".join(content["text"] for content in contents)
    with refusing(f"{observation!r:.80}: give a text, parts of text, numbers or an array"):
        if any(content.keys() & {"role", "type"} for content in contents):
            raise TypeError("is a message")
        # an error for an object, of which Python may write no more than its address
        json.dumps(observation, skipkeys=True, default=lambda part: part.tolist())
    if isinstance(observation, np.ndarray):  # `str` leaves out the middle of a large array
        return np.array2string(observation, threshold=observation.size + 1)
    return "" if observation is None else str(observation)


def arguments_of(environment: Any, example: Example) -> Mapping[str, Any]:
    """The fields of a row that the environment's `reset` takes."""
    named = inspect.signature(environment.reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return example.fields
    return {name: value for name, value in example.fields.items() if name in named}


class TurnTask(WrappedTask):
    """A task whose prompts end with the environment's first observation, and list the tools."""

    def __init__(self, source: Task, environments: EnvironmentSet, seed: int) -> None:
        super().__init__(source)
        self.environments = environments
        self.seed = seed

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Ask an example in its environment. Raises RunFailed if the environment fails."""
        # 1. The first observation.
        seed = int(stream(self.seed, f"environment/{split}", number).integers(2**31))
        example = replace(example, fields={"seed": seed, **example.fields})
        spec = self.environments.spec_of(example)
        about = f"environment {spec.name}: {example.label}"
        session = Session(spec.make, spec.timeout_s)
        begin = partial(session.reset, example)
        _, observation, error = called(begin, spec.timeout_s)
        called(session.close, spec.timeout_s)
        if error:
            raise RunFailed(f"{about}: {failure(error)}") from error
        if session.environment is spec.shown:
            advice = "make a new one for each completion"
            raise ConfigError(f"{about}: the callable returned the same object again; {advice}")

        # 2. The prompt with the observation and the tools.
        example = self._with_tools(example, spec)
        if example.messages:
            return replace(example, messages=extended(example.messages, observation))
        return replace(example, prompt=example.prompt + observation)

    def known(self, number: int) -> Example:
        """A row as it is asked, but without the first observation: a reset may take long."""
        example = self.source.known(number)
        example = replace(example, fields={"seed": 0, **example.fields})
        with refusing(example.label):
            spec = self.environments.spec_of(example)
            signature = inspect.signature(spec.shown.reset)
            signature.bind(**arguments_of(spec.shown, example))
        return self._with_tools(example, spec)

    @cached_property
    def schemas(self) -> dict[str, dict[str, Schema]]:
        """The schemas of the tools that each environment offers, by its name and theirs."""
        return {
            spec.name: {
                name: tool.schema for name, tool in self.environments.tools_of(spec.shown).items()
            }
            for spec in self.environments.specs.values()
        }

    def _with_tools(self, example: Example, spec: EnvironmentSpec) -> Example:
        """Add the tools of the run to a row's own, and replace those of equal names."""
        schemas = self.schemas[spec.name]
        own = example.tools or ()
        others = [each for each in own if each.get("function", each).get("name") not in schemas]
        return replace(example, tools=[*others, *schemas.values()])

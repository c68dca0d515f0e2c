"""Environments that answer turns, and a task whose prompts begin in one.

The interface is TRL's, by the names of methods alone, so there is no base class:

    class Environment:                  an instance for each completion
        reset(self, **row)              may return what the user says first, or more of it
        any_public_method(self, x: int) a tool, if there is no step
        step(self, text)                a game: (observation, reward, done), or Gymnasium's five
        get_reward(self)                optional: the reward at the end, of a game else the sum
        close(self)                     optional: gives back what the environment holds

Each may be `async`, and a callable that makes environments may stand for their class. `reset` gets
the keys of a data row that its signature names, and `seed`. It must say the same to all
completions of a prompt, because they start alike. Plain functions are tools too.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Number
from typing import Any

import numpy as np

from ..errors import refusing
from ..model.chat import Tool as Schema
from ..model.chat import extended
from ..runtime.guard import RunFailed
from ..runtime.pool import Outcome, called, finished, seconds
from ..runtime.rng import stream
from ..task import Task
from ..tasks.base import ChangedTask
from ..types import ConfigError, Example
from ..userfiles import failure, load_name
from .tools import TIMEOUT_S, Tool

# public methods that the model cannot call
NOT_TOOLS = ("reset", "step", "get_reward", "close")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolsAlone:
    """The environment of a run that has only functions as tools."""

    def reset(self) -> None: ...


@dataclass(eq=False)
class Session:
    """An environment of one completion or prompt: made when it is needed, and closed once.

    It is closed even if a call that took too long is still in it. Often that ends the call, such as
    one that waits for a process. If it is still being made, the thread that makes it closes it.
    """

    make: Callable[[], Any]
    timeout_s: float  # of a call
    environment: Any = None
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> Any:
        """Make the environment."""
        made = None if self.is_over else finished(self.make(), self.timeout_s)
        self.environment = made
        if self.is_over:
            self.close()
            raise RuntimeError("the episode is over")
        return made

    def close(self) -> None:
        self.is_over = True
        with self.lock:  # who takes the environment closes it
            environment, self.environment = self.environment, None
        if hasattr(environment, "close"):
            finished(environment.close(), self.timeout_s)


def is_game(environment: Any) -> bool:
    """Whether an environment, or its class, answers by `step`, and has no tools."""
    return hasattr(environment, "step")


def class_of(environment: Any) -> type[Any]:
    return environment if isinstance(environment, type) else type(environment)


def tool_names(environment: Any) -> list[str]:
    """The methods of an environment, or of its class, that the model may call."""
    if is_game(environment):
        return []
    members = inspect.getmembers(class_of(environment), is_method)
    return [name for name, _ in members if name[0] != "_" and name not in NOT_TOOLS]


def is_method(member: Any) -> bool:
    """Whether a member of a class is a method, perhaps with a cache, or a class method."""
    return inspect.ismethod(member) or inspect.isfunction(inspect.unwrap(member))


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments, and what makes one for each completion."""

    make: Callable[[], Any]
    shown: Any  # the class; or an environment, made to see what those of a callable have
    timeout_s: float  # of a call

    @classmethod
    def of(cls, given: Any) -> "EnvironmentKind":
        """The kind of a class, or of what a callable makes. Raises ConfigError."""
        shown = given
        with refusing(f"environment {getattr(given, '__name__', given)!s:.80}"):
            if not isinstance(given, type):
                if not callable(given) or hasattr(given, "reset"):
                    raise ConfigError("give its class: each completion needs one of its own")
                shown, outcome = tried(given, timeout_of(given), repr(given), lambda made: None)
                if outcome.error:
                    raise outcome.error
            return cls(given, shown, timeout_of(shown, given))

    @property
    def name(self) -> str:
        """The name of the class, which its reward has too."""
        return class_of(self.shown).__name__


def timeout_of(*givers: Any) -> float:
    """The `timeout_s` of the first that has one. Raises ConfigError."""
    found = (giver.timeout_s for giver in givers if hasattr(giver, "timeout_s"))
    return seconds(next(found, TIMEOUT_S))


def tried(
    make: Callable[[], Any], timeout_s: float, about: str, use: Callable[[Any], object]
) -> tuple[Any, Outcome]:
    """An environment that is made for a single use and closed; and what came of the use."""
    session = Session(make, timeout_s)
    outcome = called(lambda: use(session.begin()), timeout_s, about)
    environment = session.environment
    called(session.close, timeout_s, about)  # dialogues warn of an error in it
    return environment, outcome


def by_name(what: str, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Things by their names. Raises ConfigError if two have the same one."""
    found: dict[str, Any] = {}
    for name, value in named:
        if found.setdefault(name, value) != value:
            raise ConfigError(f"two {what} have the name {name}: rename one")
    return found


@dataclass(frozen=True)
class EnvironmentSet:
    kinds: Mapping[str, EnvironmentKind]  # by the name that a row's `environment` gives
    tools: Mapping[str, Tool]  # of all environments but games

    @classmethod
    def of(cls, environment: Any = None, tools: Any = ()) -> "EnvironmentSet":
        """The set of a class, or what makes environments, or several by name; and of tools."""
        if isinstance(environment, Mapping):
            kinds = {name: EnvironmentKind.of(given) for name, given in environment.items()}
        else:
            kind = EnvironmentKind.of(ToolsAlone if environment is None else environment)
            kinds = {kind.name: kind}
        by_name("environments", [(kind.name, class_of(kind.shown)) for kind in kinds.values()])
        functions = [Tool.of(tool) for tool in ([tools] if callable(tools) else tools)]
        named = by_name("tools", [(tool.name, tool) for tool in functions])
        for kind in kinds.values():
            by_name("tools", [*named.items(), *((name, kind) for name in tool_names(kind.shown))])
        return cls(kinds, named)

    @classmethod
    def load(cls, setting: str, tools: Sequence[Callable[..., Any]] = ()) -> "EnvironmentSet":
        """The classes and functions of FILE.py:NAME,FILE.py:NAME. A file is run: trust it."""
        named = [load_name("--environment", name) for name in setting.split(",")]
        classes = [(value.__name__, value) for value in named if isinstance(value, type)]
        functions = [value for value in named if not isinstance(value, type)]
        return cls.of(by_name("environments", classes) or None, [*tools, *functions])

    @cached_property
    def parts(self) -> dict[str, float]:
        """The environments that give a reward, by the name of their class, and its weight."""
        return {
            kind.name: 1.0
            for kind in self.kinds.values()
            if is_game(kind.shown) or hasattr(kind.shown, "get_reward")
        }

    @property
    def reset_keys(self) -> set[str]:
        """The keys of rows that `reset` names, of all environments."""
        signatures = [inspect.signature(kind.shown.reset) for kind in self.kinds.values()]
        named = {x.name for each in signatures for x in each.parameters.values() if x.kind in NAMED}
        return named - {"self", "seed"}

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """An environment's public methods, and the tools of the run. A game has none."""
        if is_game(environment):
            return {}
        own = {name: Tool(name, getattr(environment, name)) for name in tool_names(environment)}
        return {**own, **self.tools}

    def kind_of(self, example: Example) -> EnvironmentKind:
        name = example.fields.get("environment", next(iter(self.kinds)))
        if name not in self.kinds:
            raise ConfigError(f"{example.label}: environment {name!r} is none of {[*self.kinds]}")
        return self.kinds[name]


def reset(environment: Any, example: Example, timeout_s: float) -> str:
    """What an environment says first."""
    row = arguments_of(inspect.signature(environment.reset), example)
    said = environment.reset(**copy.deepcopy(row))  # an episode may empty a list in it
    return as_text(finished(said, timeout_s))


def as_text(said: Any) -> str:
    """What `reset` or `step` says, as the model reads it. Raises TypeError for what is no text.

    Of Gymnasium's (observation, info) it is the former, of a message's parts their texts, and of
    numbers and arrays what Python writes.
    """
    if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], Mapping | None):
        return as_text(said[0])
    parts = said if isinstance(said, list) else [said]
    if all(isinstance(x, Mapping) and x.get("type") == "text" for x in parts):
        return "".join(part["text"] for part in parts)
    if not is_plain(said):
        raise TypeError(f"{said!r:.80}: give a text, parts of text, numbers or an array")
    if isinstance(said, np.ndarray):  # its own text leaves out the middle of a large one
        return np.array2string(said, threshold=said.size + 1)
    return "" if said is None else str(said)


def is_plain(said: Any) -> bool:
    """Whether Python's words for an observation say all of it. A message is no observation."""
    if isinstance(said, Mapping):
        return not said.keys() & {"role", "type"} and all(map(is_plain, said.values()))
    if isinstance(said, list | tuple):
        return all(map(is_plain, said))
    return said is None or isinstance(said, str | Number) or hasattr(said, "tolist")


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
        """Raises RunFailed if the environment cannot say what is asked."""
        seed = int(stream(self.seed, f"environment/{split}", number).integers(2**31))
        example = replace(example, fields={"seed": seed, **example.fields})
        kind = self.environments.kind_of(example)
        about = f"environment {kind.name}: {example.label}"
        begin = partial(reset, example=example, timeout_s=kind.timeout_s)
        environment, (_, said, error) = tried(kind.make, kind.timeout_s, about, begin)
        if error:
            raise RunFailed(f"{about}: {failure(error)}") from error
        if environment is kind.shown:
            raise ConfigError(f"{about}: is the same as before; each completion needs its own")
        messages = extended(example.messages, said) if example.messages else []
        if not messages:
            example = replace(example, prompt=example.prompt + said)
        tools = self.environments.tools_of(environment)
        schemas = {name: tool.schema for name, tool in tools.items()}
        return replace(example, messages=messages, tools=schemas_of(example, schemas))

    def known(self, number: int) -> Example:
        """A row as it is asked, but for what its environment says first: to reset may take long."""
        example = self.source.known(number)
        example = replace(example, fields={"seed": 0, **example.fields})
        reset, schemas = self.interfaces[self.environments.kind_of(example).name]
        with refusing(example.label):
            reset.bind(**arguments_of(reset, example))
        return replace(example, tools=schemas_of(example, schemas))

    @cached_property
    def interfaces(self) -> Mapping[str, tuple[inspect.Signature, Mapping[str, Schema]]]:
        """The signature of `reset`, and the schemas of the tools, of each kind of environment."""

        def look_at(environment: Any) -> tuple[inspect.Signature, Mapping[str, Schema]]:
            tools = self.environments.tools_of(environment)
            schemas = {name: tool.schema for name, tool in tools.items()}
            return inspect.signature(environment.reset), schemas

        found = {}
        for kind in self.environments.kinds.values():
            about = f"environment {kind.name}"
            outcome = tried(kind.make, kind.timeout_s, about, look_at)[1]
            if isinstance(outcome.error, ConfigError):  # of a method that is no tool
                raise outcome.error
            if outcome.error:
                raise RunFailed(f"{about}: {failure(outcome.error)}") from outcome.error
            found[kind.name] = outcome.result
        return found


def schemas_of(example: Example, schemas: Mapping[str, Schema]) -> list[Schema]:
    """The schemas of a row's own tools, and those of the run, by name, each once."""
    own = example.tools or ()
    others = [x for x in own if x.get("function", x).get("name") not in schemas]
    return [*others, *schemas.values()]

"""Environments that answer turns, and a task whose prompts begin in one.

The interface is TRL's, by the names of methods alone, so there is no base class: docs/turns.md.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import RunFailed, refusing
from ..rewards.functions import as_numbers
from ..rng import stream
from ..runtime.calls import called, finished
from ..task import Task
from ..tasks.base import WrappedTask
from ..text.chat import Message, Schema, extended
from ..text.tokenizer import Tokenizer
from ..types import Completion, ConfigError, Example
from ..userfiles import failure, load_name, name_of
from .tools import TIMEOUT_S, CallForm, Result, Tool, calls_of, result_of

NOT_TOOLS = ("reset", "step", "get_reward", "close")  # the model cannot call these


class ToolsAlone:
    """The environment of a run whose tools are plain functions."""

    def reset(self) -> None: ...


@dataclass(frozen=True, eq=False)
class EnvironmentSpec:
    """A class of environments, or another callable, which makes one for each completion."""

    make: Callable[[], Any]
    functions: Mapping[str, Tool]  # the tools of the run, which an environment without steps offers
    shown: Any  # an environment that was made and closed, for its methods
    timeout_s: float  # limit of a call

    @classmethod
    def of(cls, given: Any, functions: Mapping[str, Tool]) -> "EnvironmentSpec":
        """The spec of a class, or of a callable that makes environments. Raises ConfigError."""
        with refusing(f"environment {name_of(given)}"):
            shown = finished(given(), TIMEOUT_S)
            spec = cls(given, functions, shown, float(getattr(shown, "timeout_s", TIMEOUT_S)))
            spec.close(shown)
            assert spec.schemas is not None  # raises an error now rather than in a dialogue
            return spec

    @property
    def name(self) -> str:
        """The name of the class, which is also the name of its reward."""
        return type(self.shown).__name__

    @property
    def is_game(self) -> bool:
        """Whether its environments answer by `step`, and so have no tools."""
        return hasattr(self.shown, "step")

    @property
    def has_reward(self) -> bool:
        return self.is_game or hasattr(self.shown, "get_reward")

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        return {name: tool.schema for name, tool in self.tools_of(self.shown).items()}

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """An environment's public methods, and the tools of the run. A game has none."""
        if self.is_game:
            return {}
        methods = inspect.getmembers(type(environment), inspect.isroutine)
        names = [name for name, _ in methods if name[0] != "_" and name not in NOT_TOOLS]
        own = [(name, Tool(name, getattr(environment, name))) for name in names]
        return by_name("tools", [*own, *self.functions.items()])

    def close(self, environment: Any) -> None:
        if hasattr(environment, "close"):
            finished(environment.close(), self.timeout_s)


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
        functions = [Tool.of(function) for function in ([tools] if callable(tools) else tools)]
        tools_by_name = by_name("tools", [(tool.name, tool) for tool in functions])
        if isinstance(environment, Mapping):
            given = environment.items()
            specs = {name: EnvironmentSpec.of(make, tools_by_name) for name, make in given}
        else:
            make = ToolsAlone if environment is None else environment
            spec = EnvironmentSpec.of(make, tools_by_name)
            specs = {spec.name: spec}
        by_name("environments", [(spec.name, type(spec.shown)) for spec in specs.values()])
        return cls(specs, tools_by_name)

    @classmethod
    def load(cls, setting: str, tools: Sequence[Any] = ()) -> "EnvironmentSet":
        """The classes and functions of FILE.py:NAME,FILE.py:NAME. A file is run: trust it."""
        named = [load_name("--environment", name) for name in setting.split(",")]
        classes = [(value.__name__, value) for value in named if isinstance(value, type)]
        functions = [value for value in named if not isinstance(value, type)]
        return cls.of(by_name("environments", classes) or None, [*functions, *tools])

    @cached_property
    def reward_weights(self) -> dict[str, float]:
        """The weights of the environments' rewards, by the names of their classes."""
        return {spec.name: 1.0 for spec in self.specs.values() if spec.has_reward}

    @property
    def reads_rows(self) -> bool:
        """Whether there is an environment, which may read all of a row and ask by itself."""
        return not any(isinstance(spec.shown, ToolsAlone) for spec in self.specs.values())

    def spec_of(self, example: Example) -> EnvironmentSpec:
        """The spec that a row's `environment` names, else the first."""
        name = example.fields.get("environment", next(iter(self.specs)))
        return self.specs[name]


def as_text(observation: Any) -> str:
    """The text of a result of `reset` or `step`. Raises ConfigError if it has none."""
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


@dataclass(eq=False)
class Episode:
    """A completion in its environment: what was said after the prompt, and its reward."""

    spec: EnvironmentSpec
    example: Example
    environment: Any = None  # made when it is needed
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # what the policy said
    results: list[Result] = field(default_factory=list)  # results of its calls of tools
    num_tokens: int = 0  # tokens of the completion before the turn in work
    is_closed: bool = True  # whether a stop token ended the last turn, and not a text of --stop
    reward: float = 0.0  # sum of a game's rewards so far
    over: bool = False  # whether the game has ended
    cut: bool = False  # whether a limit ended the dialogue after an answer
    final: float | None = None  # the reward at the end, or None if it does not concern the row
    error: str | None = None  # what the environment raised, or that it took too long

    def begin(self) -> str:
        """Make the environment and reset it; return its first observation as a text."""
        self.environment = finished(self.spec.make(), self.spec.timeout_s)
        row = self.example.fields
        named = inspect.signature(self.environment.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
            row = {name: value for name, value in row.items() if name in named}
        answer = self.environment.reset(**copy.deepcopy(row))  # an episode may change its row
        return as_text(finished(answer, self.spec.timeout_s))

    def begun(self) -> Any:
        """The environment, which begins at the first call. The prompt has what it says first."""
        if self.environment is None:
            observation = self.begin()
            messages = self.example.messages
            asking = [message["content"] for message in messages if message["role"] != "assistant"]
            if not [self.example.prompt, *asking][-1].endswith(observation):
                raise ValueError("reset must say the same to all completions of a prompt")
        return self.environment

    def close(self) -> None:
        self.spec.close(self.environment)

    def take_turn(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """Note what the policy said last, and return it; `ids` are all tokens up to its end."""
        text = tokenizer.decode(ids[self.num_tokens :])
        self.messages.append({"role": "assistant", "content": text})
        self.turns.append(text)
        self.num_tokens = len(ids)
        self.is_closed = ids[-1] in tokenizer.stops
        return text

    def answer(self, text: str, form: CallForm | None = None) -> list[Message]:
        """What the environment answers to a turn: nothing if it has no call in this form."""
        environment = self.begun()
        timeout_s = self.spec.timeout_s
        if not self.spec.is_game:
            tools = self.spec.tools_of(environment)
            results = [
                result_of(tools, name, arguments, timeout_s)
                for name, arguments in calls_of(text, form)
            ]
            self.results += results
            return [result.message for result in results]
        observation, reward, done, *more = finished(environment.step(text), timeout_s)
        self.reward += float(reward)
        # Gymnasium returns observation, reward, terminated, truncated and info.
        self.over = bool(done or (len(more) == 2 and more[0]))
        return [{"role": "user", "content": as_text(observation)}]

    def score(self) -> float | None:
        final = getattr(self.begun(), "get_reward", None)
        reward = finished(final(), self.spec.timeout_s) if final else self.reward
        return None if reward is None else float(as_numbers(reward, ()))

    def completion(self) -> Completion:
        """The text of the last turn, with the messages and the reward of the whole dialogue."""
        return Completion(
            self.turns[-1],
            is_dialogue=True,
            messages=self.messages,
            turns=len(self.turns),
            failed_calls=[each.has_failed for each in self.results] if self.spec.schemas else None,
            cut=self.cut,
            error=self.error,
            rewards={self.spec.name: self.final} if self.spec.has_reward else {},
        )


class TurnTask(WrappedTask):
    """A task whose prompts end with the environment's first observation, and list the tools."""

    def __init__(
        self,
        source: Task,
        environments: EnvironmentSet,
        seed: int,
    ) -> None:
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
        episode = Episode(spec, example)
        _, observation, error = called(episode.begin, spec.timeout_s)
        called(episode.close, spec.timeout_s)
        if error:
            raise RunFailed(f"{about}: {failure(error)}") from error
        if episode.environment is spec.shown:
            advice = "make a new one for each completion"
            raise ConfigError(f"{about}: the callable returned the same object again; {advice}")

        # 2. The prompt with the observation and the tools.
        example = self._with_tools(example, spec)
        if example.messages:
            return replace(example, messages=extended(example.messages, observation))
        return replace(example, prompt=example.prompt + observation)

    def known(self) -> Sequence[Example]:
        """The rows as they are asked, but without first observations: a reset may take long."""
        examples = []
        for example in self.source.known():
            with refusing(example.label):
                examples.append(self._with_tools(example, self.environments.spec_of(example)))
        return examples

    def _with_tools(self, example: Example, spec: EnvironmentSpec) -> Example:
        own = example.tools or ()
        names = spec.schemas.keys()
        others = [each for each in own if each.get("function", each).get("name") not in names]
        return replace(example, tools=[*others, *spec.schemas.values()])

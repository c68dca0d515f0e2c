"""Several turns: environments, tools, and the dialogues that completions then are.

The interface is TRL's, by the names of methods alone, so there is no base class:

    class Environment:                  an instance for each completion
        reset(self, **row)              may return what the user says first, or more of it
        any_public_method(self, x: int) a tool, if there is no step
        step(self, text)                a game: (observation, reward, done), or Gymnasium's five
        get_reward(self)                optional: the reward at the end, of a game else the sum

`reset` gets the keys of a data row that its signature names, and `seed`. It must say the same to
all completions of a prompt, because they start alike. Plain functions are tools too. A model calls
tools as Qwen or Llama does, and reads the results before its next turn; a turn that calls none is
the last one.

The tokens of a dialogue are those that were sampled, and between them what the chat template writes
around the answers. No turn is rendered or encoded again.
"""

import asyncio
import copy
import inspect
import json
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from pydantic import TypeAdapter, validate_call

from .config import Config
from .model.chat import Message
from .model.tokenizer import Tokenizer
from .rewards import as_numbers
from .runtime.pool import Pool
from .runtime.rng import stream
from .task import Task
from .types import Completions, ConfigError, Dialogue, Example, Warn

NO_TOOLS = ("reset", "step", "get_reward")  # public methods that are none
TIMEOUT_S = 10.0  # of a turn; a class may have a timeout_s of its own
SEEDS = 2**31
# how Qwen calls a tool; Llama's whole turn is the object, perhaps after <|python_tag|>
CALL = re.compile(
    r'<tool_call>(.*?)</tool_call>|^(?:<\|python_tag\|>)?(\{.*"name".*\})$', re.DOTALL
)
# in a docstring of Google's style, with its further lines
ARGUMENT = re.compile(r"^( +)(\w+)[^:\n]*:\s*(.+(?:\n\1 +.+)*)", re.MULTILINE)
SCHEMA = ("type", "properties", "required", "$defs")  # what is kept of a tool's JSON schema
Tools = Mapping[str, Callable[..., Any]]

# --- tools ----------------------------------------------------------------------------------------


def schema_of(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """A tool as chat templates expect it, from its type hints and its docstring."""
    about, _, arguments = (inspect.getdoc(tool) or "").partition("\nArgs:\n")
    told = {x: text for _, x, text in ARGUMENT.findall(re.split(r"\n(?=\S)", arguments)[0])}
    schema = TypeAdapter[Any](tool).json_schema()  # type: ignore[arg-type]
    for argument, described in schema["properties"].items():
        described.pop("title", None)
        if argument in told:
            described["description"] = " ".join(told[argument].split())
    parameters = {key: schema[key] for key in SCHEMA if key in schema}
    function = {"name": name, "description": about.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def calls_of(text: str) -> list[tuple[str, Any]]:
    """The tools that a turn calls after </think>, by name, with their arguments."""
    calls, said = list[tuple[str, Any]](), text.rpartition("</think>")[2].strip()
    for written in (found[1] or found[2] for found in CALL.finditer(said)):
        try:
            call = json.loads(written)
            calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
        except (ValueError, LookupError, TypeError, AttributeError):
            calls.append((written, {}))  # the model reads that there is no such tool
    return calls


# --- environments ---------------------------------------------------------------------------------


class ToolsAlone:
    """The environment of a run that has none."""

    def reset(self) -> None: ...


@dataclass(frozen=True)
class World:
    """The environments and tools of a run."""

    classes: Mapping[str, type[Any]]
    tools: Tools

    @classmethod
    def of(cls, environment: Any = None, tools: Sequence[Callable[..., Any]] = ()) -> "World":
        """
        Args:
            environment: a class, or several by the name that a row's `environment` gives; or
                `FILE.py:NAME,..` of classes and functions. A file is run: trust it.
            tools: functions, of all environments but games.
        """
        if isinstance(environment, str):
            run = cache(runpy.run_path)  # once, as environments and tools may share variables
            found = [load_name("--environment", x, run) for x in environment.split(",")]
            tools = [*tools, *(x for x in found if not isinstance(x, type))]
            environment = {x.__name__: x for x in found if isinstance(x, type)}
        environment = environment or ToolsAlone
        if not isinstance(environment, Mapping):
            environment = {getattr(environment, "__name__", ""): environment}
        if not all(isinstance(kind, type) for kind in environment.values()):
            raise ConfigError("environment: give a class, or a dict of classes")
        return cls(environment, {tool.__name__: tool for tool in tools})

    @property
    def __name__(self) -> str:
        return ",".join([*self.classes, *self.tools])

    @cached_property
    def parts(self) -> dict[str, float]:
        """The environments that give a reward, by the name of their class, and its weight."""
        giving = [x for x in self.classes.values() if {"step", "get_reward"} & {*dir(x)}]
        return {x.__name__: 1.0 for x in giving}

    def tools_of(self, environment: Any) -> Tools:
        """Its public methods, and the tools of the run. A game has none."""
        if hasattr(environment, "step"):
            return {}
        members = inspect.getmembers(type(environment), inspect.isfunction)
        names = [name for name, _ in members if name[0] != "_" and name not in NO_TOOLS]
        return {**{name: getattr(environment, name) for name in names}, **self.tools}

    def class_of(self, example: Example) -> type[Any]:
        name = example.fields.get("environment", next(iter(self.classes)))
        if name not in self.classes:
            raise ConfigError(f"environment {name!r} is none of {', '.join(self.classes)}")
        return self.classes[name]


def load_name(flag: str, setting: str, run: Callable[[str], Any] = runpy.run_path) -> Any:
    """What FILE.py:NAME means. Raises ConfigError."""
    file, _, name = setting.rpartition(":")
    found = run(file).get(name) if file else None
    if found is None:
        raise ConfigError(f"{flag} {setting}: there is none; give FILE.py:NAME")
    return found


def reset(environment: Any, example: Example) -> str:
    """What an environment says first; of Gymnasium's (observation, info) the former."""
    row = copy.deepcopy(example.fields)  # an episode may empty a list in it
    named = inspect.signature(environment.reset).parameters
    if not any(x.kind is x.VAR_KEYWORD for x in named.values()):
        row = {name: value for name, value in row.items() if name in named}
    said = environment.reset(**row) or ""
    return str(said[0]) if isinstance(said, tuple) else said


@dataclass
class Begun:
    """A task whose prompts end with what the environment says first, and name the tools."""

    task: Task
    world: World
    seed: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["task"], name)

    def train(self, number: int) -> Example:
        return self._begin(self.task.train(number), "train", number)

    def held_out(self, number: int) -> Example:
        return self._begin(self.task.held_out(number), "held-out", number)

    def longest(self, number: int) -> Sequence[Example]:
        return [self._begin(example, "longest", 0) for example in self.task.longest(number)]

    def _begin(self, example: Example, split: str, number: int) -> Example:
        seed = int(stream(self.seed, f"environment/{split}", number).integers(SEEDS))
        example = replace(example, fields={"seed": seed, **example.fields})
        environment = self.world.class_of(example)()
        said, messages = reset(environment, example), [*example.messages]
        if messages:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + said}
        else:
            example = replace(example, prompt=example.prompt + said)
        schemas = [schema_of(*tool) for tool in self.world.tools_of(environment).items()]
        return replace(example, messages=messages, tools=[*(example.tools or ()), *schemas])


# --- dialogues ------------------------------------------------------------------------------------


class Episode:
    """A completion in its environment: what was said after the prompt, and what it is worth."""

    def __init__(self, world: World, example: Example) -> None:
        self.world, self.example, self.kind = world, example, world.class_of(example)
        self.environment: Any = None
        self.messages: list[Message] = []
        self.start = 0  # tokens of the completion before the turn in work
        self.said, self.reward = list[str](), 0.0  # what the policy said, by turn
        self.over = self.cut = self.failed = False
        self.timeout_s = getattr(self.kind, "timeout_s", TIMEOUT_S)

    def begin(self) -> Any:
        """The environment, made when it is first needed: the prompt has what it says first."""
        if self.environment is None:
            self.environment = self.kind()
            said, messages = reset(self.environment, self.example), self.example.messages
            if not (messages[-1]["content"] if messages else self.example.prompt).endswith(said):
                raise ValueError("reset must say the same to all completions of a prompt")
        return self.environment

    def answer(self, text: str) -> list[Message]:
        """What the environment answers to a turn; nothing, if the turn calls no tool."""
        environment = self.begin()
        if not hasattr(environment, "step"):
            tools = self.world.tools_of(environment)
            return [result_of(tools, *call) for call in calls_of(text)]
        observation, reward, done, *more = environment.step(text)
        self.reward += float(reward)
        # Gymnasium's five are observation, reward, terminated, truncated, info
        self.over = bool(done or (len(more) == 2 and more[0]))
        return [{"role": "user", "content": str(observation)}]

    def score(self) -> float:
        """The reward of the environment."""
        final = getattr(self.begin(), "get_reward", None)
        return float(as_numbers(final() if final else self.reward, ()))

    def dialogue(self) -> Dialogue:
        """The text of the last turn, with the messages and the reward of the whole dialogue."""
        text, name = Dialogue(self.said[-1]), self.kind.__name__
        text.messages, text.turns = self.messages, len(self.said)
        text.cut, text.failed = self.cut, self.failed
        reward = 0.0 if self.failed else self.reward
        text.rewards = {name: reward} if name in self.world.parts else {}
        return text


def result_of(tools: Tools, name: str, arguments: Any) -> Message:
    """What a tool returns, as a message; an error is one too."""
    try:
        result = validate_call(tools[name])(**arguments)
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
    except Exception as error:
        result = {"error": repr(error)}
    return {"role": "tool", "name": name, "content": str(result)}


class Dialogues:
    """Answers the turns of a batch of completions, and keeps what was said.

    Completion g of prompt p is sequence p * G + g.
    """

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer, warn: Warn) -> None:
        self.world, self.tokenizer, self.warn, self.has_warned = world, tokenizer, warn, False
        self.max_turns, self.longest = config.sampling.max_turns, config.sampling.max_new_tokens
        self.num_workers, self.pool = config.speed.num_reward_workers, Pool(0)
        self.episodes: list[Episode] = []
        self.encode = lru_cache(maxsize=1 << 14)(self._encode)  # games repeat what they say
        for kind in world.classes.values():  # refuse a template that cannot write answers
            role = "user" if hasattr(kind, "step") else "tool"
            if role == "tool" and not tokenizer.chat:
                raise ConfigError(f"tools: --tokenizer {tokenizer.name} has no chat template")
            self.encode(json.dumps([{"role": role, "name": "tool", "content": "A"}]))

    def begin(self, examples: Sequence[Example], num_samples: int) -> None:
        """Begin a batch, or begin it again."""
        self.episodes = [Episode(self.world, x) for x in examples for _ in range(num_samples)]
        self.pool.close()
        self.pool = Pool(self.num_workers)

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        """Have a turn answered. `ids`: all tokens of the completion so far, the turn included."""
        episode = self.episodes[sequence]
        answer = partial(episode.answer, self._take_turn(episode, ids))
        self.pool.submit(sequence, answer, episode.timeout_s)

    def replies(self, *, wait: bool) -> dict[int, list[int]]:
        """Tokens after which a sequence goes on, by sequence; none: its dialogue is over.

        With `wait`, there is at least one reply if one is to come.
        """
        return {
            sequence: self._go_on(self.episodes[sequence], messages or [], error)
            for sequence, messages, error in self.pool.ended(wait=wait)
        }

    def finish(self, completions: Completions) -> list[list[str]]:
        """The dialogues of the batch, `[P][G]`, with the rewards of their environments."""
        rows = completions.completion_ids.flatten(0, 1).tolist()
        lengths = completions.completion_len.flatten().tolist()
        for episode, ids, length in zip(self.episodes, rows, lengths, strict=True):
            if length > episode.start:  # cut off within a turn
                self._take_turn(episode, ids[:length])
            if self.world.parts and not episode.failed:
                self.pool.submit(episode, episode.score, episode.timeout_s)
        for episode, reward, error in self.pool.all():
            self._go_on(episode, [], error)
            episode.reward = reward or 0.0
        texts: list[str] = [episode.dialogue() for episode in self.episodes]
        size = completions.completion_ids.shape[1]
        return [texts[i : i + size] for i in range(0, len(texts), size)]

    def _take_turn(self, episode: Episode, ids: Sequence[int]) -> str:
        """Add what the policy said to the messages."""
        text = self.tokenizer.decode(ids[episode.start :])
        episode.messages.append({"role": "assistant", "content": text})
        episode.said.append(text)
        episode.start = len(ids)
        return text

    def _go_on(
        self, episode: Episode, messages: list[Message], error: BaseException | None
    ) -> list[int]:
        """Add an answer to the messages; return its tokens if the dialogue goes on after it."""
        episode.messages += messages
        ids = list[int]()
        try:
            if error:
                raise error
            if messages and not episode.over:
                ids = self.encode(json.dumps(messages))
        except Exception as failure:  # of the environment; or the answer spells a special token
            episode.failed = True
            if not self.has_warned:
                self.has_warned = True
                self.warn(f"environment: {failure!r:.200}; such a dialogue ends with reward 0")
        full = episode.start + len(ids) >= self.longest  # there must be room for a turn after it
        if ids and (len(episode.said) == self.max_turns or full):
            episode.cut, ids = True, []
        episode.start += len(ids)
        return ids

    def _encode(self, messages: str) -> list[int]:
        """The tokens of answers, given as JSON, up to where the next turn begins."""
        answers = json.loads(messages)
        if self.tokenizer.chat:
            return self.tokenizer.encode(self.tokenizer.chat.between(answers), special=True)
        # a dialogue goes on after at least one token
        return self.tokenizer.encode("".join(answer["content"] for answer in answers) or "\n")

"""Dialogues: completions of several turns, and what is said between them.

The tokens of a dialogue are those that were sampled, and between them what the chat template writes
around the answers. No turn is rendered or encoded again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from ..config import Config
from ..model.chat import Message
from ..model.tokenizer import Tokenizer
from ..rewards import as_numbers
from ..runtime.pool import Pool
from ..types import Completions, ConfigError, Dialogue, Example, Warn
from ..userfiles import place_of
from .environments import EnvironmentSet, is_game, reset
from .tools import calls_of, result_of

TIMEOUT_S = 10.0  # of a turn; a class may have a timeout_s of its own
ENCODINGS_KEPT = 1 << 14


@dataclass(eq=False)
class Episode:
    """A completion in its environment: what was said after the prompt, and what it is worth."""

    environments: EnvironmentSet
    example: Example
    environment: Any = None  # made when it is first needed: the prompt has what it says first
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # what the policy said
    num_tokens: int = 0  # of the completion before the turn in work
    reward: float = 0.0  # of a game so far
    over: bool = False  # the game has ended
    cut: bool = False  # ended by a limit
    failed: bool = False  # the environment raised an error or took too long

    @property
    def kind(self) -> type[Any]:
        return self.environments.class_of(self.example)

    @property
    def timeout_s(self) -> float:
        return getattr(self.kind, "timeout_s", TIMEOUT_S)

    def begin(self) -> Any:
        """The environment, made if there is none yet."""
        if self.environment is None:
            self.environment = self.kind()
            said = reset(self.environment, self.example)
            messages = self.example.messages
            prompt = messages[-1]["content"] if messages else self.example.prompt
            if not prompt.endswith(said):
                raise ValueError("reset must say the same to all completions of a prompt")
        return self.environment

    def answer(self, text: str) -> list[Message]:
        """What the environment answers to a turn; nothing, if the turn calls no tool."""
        environment = self.begin()
        if not is_game(environment):
            tools = self.environments.tools_of(environment)
            return [result_of(tools, name, arguments) for name, arguments in calls_of(text)]
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
        name = self.kind.__name__
        reward = 0.0 if self.failed else self.reward
        return Dialogue(
            self.turns[-1],
            messages=self.messages,
            turns=len(self.turns),
            cut=self.cut,
            failed=self.failed,
            rewards={name: reward} if name in self.environments.parts else {},
        )


class Dialogues:
    """Answers the turns of a batch of completions, and keeps what was said.

    Completion g of prompt p is sequence p * G + g.
    """

    def __init__(
        self, config: Config, environments: EnvironmentSet, tokenizer: Tokenizer, warn: Warn
    ) -> None:
        """Raises ConfigError for a chat template that cannot write answers."""
        self.environments = environments
        self.tokenizer = tokenizer
        self.warn = warn
        self.has_warned = False
        self.max_turns = config.sampling.max_turns
        self.max_new_tokens = config.sampling.max_new_tokens
        self.num_workers = config.speed.num_reward_workers
        self.pool = Pool(0)
        self.episodes: list[Episode] = []
        self.encode = lru_cache(maxsize=ENCODINGS_KEPT)(self._encode)  # games repeat what they say
        for kind in environments.classes.values():
            if not (is_game(kind) or tokenizer.chat):
                raise ConfigError(f"tools: --tokenizer {tokenizer.name} has no chat template")
            role = "user" if is_game(kind) else "tool"
            self.encode(json.dumps([{"role": role, "name": "tool", "content": "A"}]))

    def begin(self, examples: Sequence[Example], num_samples: int) -> None:
        """Begin a batch, or begin it again."""
        self.episodes = [
            Episode(self.environments, example) for example in examples for _ in range(num_samples)
        ]
        self.pool.close()
        self.pool = Pool(self.num_workers)

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        """Have a turn answered. `ids`: all tokens of the completion so far, the turn included."""
        episode = self.episodes[sequence]
        answer = partial(episode.answer, self._take_turn(episode, ids))
        self.pool.submit(sequence, answer, episode.timeout_s)

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
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
            if length > episode.num_tokens:  # cut off within a turn
                self._take_turn(episode, ids[:length])
            if self.environments.parts and not episode.failed:
                self.pool.submit(episode, episode.score, episode.timeout_s)
        for episode, reward, error in self.pool.all():
            self._go_on(episode, [], error)
            episode.reward = reward or 0.0
        texts: list[str] = [episode.dialogue() for episode in self.episodes]
        size = completions.completion_ids.shape[1]
        return [texts[start : start + size] for start in range(0, len(texts), size)]

    def _take_turn(self, episode: Episode, ids: Sequence[int]) -> str:
        """Add what the policy said to the messages."""
        text = self.tokenizer.decode(ids[episode.num_tokens :])
        episode.messages.append({"role": "assistant", "content": text})
        episode.turns.append(text)
        episode.num_tokens = len(ids)
        return text

    def _go_on(
        self, episode: Episode, messages: list[Message], error: BaseException | None
    ) -> list[int]:
        """Add an answer to the messages; return its tokens if the dialogue goes on after it."""
        episode.messages += messages
        ids: list[int] = []
        try:
            if error:
                raise error
            if messages and not episode.over:
                ids = self.encode(json.dumps(messages))
        except Exception as failure:  # of the environment; or the answer spells a special token
            episode.failed = True
            if not self.has_warned:
                self.has_warned = True
                said = f"{place_of(failure)}{failure!r:.200}"
                self.warn(f"environment: {said}; such a dialogue ends with reward 0")
        # there must be room for a turn after the answer
        is_full = episode.num_tokens + len(ids) >= self.max_new_tokens
        if ids and (len(episode.turns) == self.max_turns or is_full):
            episode.cut = True
            return []
        episode.num_tokens += len(ids)
        return ids

    def _encode(self, messages: str) -> list[int]:
        """The tokens of answers, given as JSON, up to where the next turn begins."""
        answers = json.loads(messages)
        if self.tokenizer.chat:
            return self.tokenizer.encode(self.tokenizer.chat.between(answers), special=True)
        # a dialogue goes on after at least one token
        return self.tokenizer.encode("".join(answer["content"] for answer in answers) or "\n")

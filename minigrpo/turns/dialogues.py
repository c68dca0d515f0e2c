"""Dialogues: completions of several turns, and between them what the chat template writes.

No turn is rendered or encoded again.
"""

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from ..config import Config
from ..model.chat import Message
from ..model.encoding import template_args
from ..model.tokenizer import Tokenizer
from ..rewards import as_numbers
from ..runtime.pool import Pool, finished
from ..runtime.watchdog import UNMARKED, Watchdog
from ..types import Completions, ConfigError, Dialogue, Example, Warn
from ..userfiles import failure
from .environments import EnvironmentKind, EnvironmentSet, Session, as_text, is_game, reset
from .tools import CALL_ID, FORMS, CallForm, Result, calls_of, result_of


@dataclass(eq=False)
class Episode:
    """A completion in its environment: what was said after the prompt, and what it is worth."""

    environments: EnvironmentSet
    example: Example
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # what the policy said
    results: list[Result] = field(default_factory=list)  # of the calls of tools
    num_tokens: int = 0  # of the completion before the turn in work
    is_closed: bool = True  # whether the last turn ended with a stop token, not by a text of --stop
    reward: float = 0.0  # of a game so far
    over: bool = False  # the game has ended
    cut: bool = False  # ended by a limit
    final: float | None = None  # what it is worth at the end; None: does not concern the row
    error: str = ""  # what the environment raised, or that it took too long

    def __post_init__(self) -> None:
        self.session = Session(self.kind.make, self.kind.timeout_s)

    @property
    def kind(self) -> EnvironmentKind:
        return self.environments.kind_of(self.example)

    def submit(
        self, pool: Pool, key: Hashable, function: Callable[[], object], method: str = ""
    ) -> None:
        about = f"environment {self.kind.name}{method}: {self.example.prompt!r} -> {self.turns}"
        pool.submit(key, function, self.kind.timeout_s, about)

    def begin(self) -> Any:
        """The environment, made if there is none yet: the prompt has what it says first."""
        if self.session.environment is None:
            environment = self.session.begin()
            said = reset(environment, self.example, self.kind.timeout_s)
            messages = self.example.messages
            asking = [message["content"] for message in messages if message["role"] != "assistant"]
            if not [self.example.prompt, *asking][-1].endswith(said):
                raise ValueError("reset must say the same to all completions of a prompt")
        return self.session.environment

    def answer(self, text: str, form: CallForm | None = None) -> list[Message]:
        """What the environment answers to a turn; nothing, if it calls no tool in this form."""
        environment = self.begin()
        timeout_s = self.kind.timeout_s
        if not is_game(environment):
            tools = self.environments.tools_of(environment)
            calls = calls_of(text, form)
            results = [result_of(tools, name, given, timeout_s) for name, given in calls]
            self.results += results
            return [result.message for result in results]
        observation, reward, done, *more = finished(environment.step(text), timeout_s)
        self.reward += float(reward)
        # Gymnasium's five are observation, reward, terminated, truncated, info
        self.over = bool(done or (len(more) == 2 and more[0]))
        return [{"role": "user", "content": as_text(observation)}]

    def score(self) -> float | None:
        final = getattr(self.begin(), "get_reward", None)
        reward = finished(final(), self.kind.timeout_s) if final else self.reward
        return None if reward is None else float(as_numbers(reward, ()))

    def dialogue(self) -> Dialogue:
        """The text of the last turn, with the messages and the reward of the whole dialogue."""
        reward = math.nan if self.error else self.final
        rewards = {name: reward for name in self.environments.parts if name == self.kind.name}
        return Dialogue(
            self.turns[-1],
            messages=self.messages,
            turns=len(self.turns),
            failed_calls=[result.has_failed for result in self.results],
            cut=self.cut,
            error=self.error,
            rewards=rewards,
        )


@dataclass(eq=False)
class Dialogues:
    """Answers the turns of a batch; completion g of prompt p is sequence p * G + g."""

    config: Config
    environments: EnvironmentSet
    tokenizer: Tokenizer
    warn: Warn
    watchdog: Watchdog = UNMARKED

    def __post_init__(self) -> None:
        """Raises ConfigError for a chat template that cannot write answers."""
        self.warned = set[str]()  # what a warning was about
        self.pool = Pool(0, self.watchdog)
        self.episodes: list[Episode] = []
        self.encode = lru_cache(maxsize=1 << 14)(self._encode)  # games repeat what they say
        self.call_form: CallForm | None = None
        tokenizer = self.tokenizer
        for kind in self.environments.kinds.values():
            game = is_game(kind.shown)
            if not (game or tokenizer.chat):
                raise ConfigError(f"tools: --tokenizer {tokenizer.name} has no chat template")
            said = {"role": "user", "content": "A"} if game else result_of({}, "tool", {}).message
            self.encode(json.dumps([said]))
            if self.environments.tools_of(kind.shown):
                self.call_form = call_form(tokenizer)

    def begin(self, examples: Sequence[Example], num_samples: int) -> None:
        """Begin a batch, or begin it again."""
        self.close()
        self.episodes = [
            Episode(self.environments, example) for example in examples for _ in range(num_samples)
        ]
        self.pool = Pool(self.config.speed.num_reward_workers, self.watchdog)

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        """Have a turn answered. `ids`: all tokens of the completion so far, the turn included."""
        episode = self.episodes[sequence]
        answer = partial(episode.answer, self._take_turn(episode, ids), self.call_form)
        episode.submit(self.pool, sequence, answer)

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
        """The tokens of the answers that have come, by sequence; an empty one ends the dialogue.

        After an answer there is room for a turn within `max_new_tokens`. With `wait`, there is at
        least one answer if a turn was submitted.
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
            if self.environments.parts and not episode.error:
                episode.submit(self.pool, episode, episode.score)
        for episode, reward, error in self.pool.all():
            self._go_on(episode, [], error)
            episode.final = reward
        for result in (result for episode in self.episodes for result in episode.results):
            if result.error:
                said = f"tool {result.name}: {failure(result.error)}; the model reads it"
                self._warn_once(result.name, said)
        texts: list[str] = [episode.dialogue() for episode in self.episodes]
        size = completions.completion_ids.shape[1]
        return [texts[start : start + size] for start in range(0, len(texts), size)]

    def close(self) -> None:
        """Close the environments of the batch, when the calls in work have ended or are late."""
        for episode in self.episodes:
            episode.session.is_over = True  # calls that have not begun make no environment
        for _ in self.pool.all():
            pass
        for episode in self.episodes:
            if hasattr(episode.session.environment, "close"):
                # a late `score` may still hold the key of the episode
                key = (episode, "close")
                episode.submit(self.pool, key, episode.session.close, ".close")
        for (episode, _), _, error in self.pool.all():
            if error:
                said = f"environment {episode.kind.name}.close: {failure(error)}"
                self._warn_once("close", said)
        self.pool.close()
        self.episodes = []

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self.warned:
            self.warned.add(about)
            self.warn(text)

    def _take_turn(self, episode: Episode, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids[episode.num_tokens :])
        episode.messages.append({"role": "assistant", "content": text})
        episode.turns.append(text)
        episode.num_tokens = len(ids)
        episode.is_closed = ids[-1] in self.tokenizer.stops
        return text

    def _go_on(
        self, episode: Episode, messages: list[Message], error: BaseException | None
    ) -> list[int]:
        """Add an answer to the messages; return its tokens if the dialogue goes on after it."""
        episode.messages += messages
        ids: list[int] = []
        if messages and not (error or episode.over):
            args = template_args(episode.example)
            try:
                ids = self.encode(json.dumps(messages), json.dumps(args), episode.is_closed)
            except Exception as refusal:  # the answer spells a special token
                error = refusal
        if error:  # of any type: sys.exit() raises SystemExit
            episode.error = failure(error)
            advice = "such a dialogue counts as the worst of its group"
            self._warn_once("error", f"environment: {episode.error}; {advice}")
        # there must be room for a turn after the answer
        limits = self.config.sampling
        is_full = episode.num_tokens + len(ids) >= limits.max_new_tokens
        if ids and (len(episode.turns) == limits.max_turns or is_full):
            episode.cut = True
            return []
        episode.num_tokens += len(ids)
        return ids

    def _encode(self, messages: str, args: str = "{}", is_closed: bool = True) -> list[int]:
        """The tokens of answers, up to where the next turn begins; `args`: see `template_args`.

        A turn that is not closed gets the end that the template writes.
        """
        answers = json.loads(messages)
        chat = self.tokenizer.chat
        if not chat:
            # a dialogue goes on after at least one token
            return self.tokenizer.encode("".join(answer["content"] for answer in answers) or "\n")
        text = chat.between(answers, json.loads(args))
        if not is_closed:
            return self.tokenizer.encode(text, special=True)
        # the end was sampled. It may swallow white space after it (Phi's does), so it is encoded
        ids = self.tokenizer.encode(text.lstrip(), special=True)
        has_end = ids[:1] == [self.tokenizer.special.get(chat.turn_end)]
        return ids[1:] if has_end else ids


def call_form(tokenizer: Tokenizer) -> CallForm:
    """The form in which the chat template writes a call. Raises ConfigError for an unknown one."""
    chat = tokenizer.chat
    assert chat
    arguments = {"word": "tea", "number": 4}
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    asked = {"role": "user", "content": "A"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = chat.render([asked, answer], add_generation_prompt=False)
    prompt = chat.render([asked])
    start = max(n for n in range(len(prompt) + 1) if whole.startswith(prompt[:n]))
    said = tokenizer.decode(tokenizer.encode(whole[start:], special=True))
    for form in FORMS:
        if form.find(said) == [("look_up", arguments)]:
            return form
    raise ConfigError(f"tools: {chat.name} writes calls that are not read here: {said!r:.80}")

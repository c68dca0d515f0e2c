"""Dialogues: completions of several turns, with answers as the chat template writes them.

Nothing is rendered or encoded again: the tokens of an answer follow those that were sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from ..config import Config
from ..rewards.scores import as_numbers
from ..runtime.pool import Pool, finished
from ..text.chat import Message
from ..text.encoding import template_args
from ..text.tokenizer import Tokenizer
from ..types import Completion, Completions, ConfigError, Example, Warn
from ..userfiles import failure
from .environments import EnvironmentSet, EnvironmentSpec, Session, as_text, is_game
from .tools import CALL_ID, FORMS, CallForm, Result, calls_of, result_of


@dataclass(eq=False)
class Episode:
    """A completion in its environment: what was said after the prompt, and its reward."""

    environments: EnvironmentSet
    example: Example
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

    def __post_init__(self) -> None:
        self.session = Session(self.spec.make, self.spec.timeout_s)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environments.spec_of(self.example)

    def begin(self) -> Any:
        """The environment, which is made at the first call. The prompt has what it says first."""
        if self.session.environment is None:
            observation = self.session.reset(self.example)
            messages = self.example.messages
            asking = [message["content"] for message in messages if message["role"] != "assistant"]
            if not [self.example.prompt, *asking][-1].endswith(observation):
                raise ValueError("reset must say the same to all completions of a prompt")
        return self.session.environment

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
        environment = self.begin()
        timeout_s = self.spec.timeout_s
        if not is_game(environment):
            tools = self.environments.tools_of(environment)
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
        final = getattr(self.begin(), "get_reward", None)
        reward = finished(final(), self.spec.timeout_s) if final else self.reward
        return None if reward is None else float(as_numbers(reward, ()))

    def completion(self) -> Completion:
        """The text of the last turn, with the messages and the reward of the whole dialogue."""
        name = self.spec.name
        return Completion(
            self.turns[-1],
            is_dialogue=True,
            messages=self.messages,
            turns=len(self.turns),
            failed_calls=[result.has_failed for result in self.results],
            cut=self.cut,
            error=self.error,
            rewards={name: self.final} if name in self.environments.reward_weights else {},
        )


@dataclass(eq=False)
class Dialogues:
    """Answers the turns of a batch; completion g of prompt p is sequence p * G + g."""

    config: Config
    environments: EnvironmentSet
    tokenizer: Tokenizer
    warn: Warn

    def __post_init__(self) -> None:
        """Raises ConfigError for a chat template that cannot write answers."""
        self.warned = set[str]()  # the subjects of the warnings so far
        self.pool = Pool(0)
        self.episodes: list[Episode] = []
        self.encode = lru_cache(maxsize=1 << 14)(self._encode)  # games repeat what they say
        self.call_form: CallForm | None = None
        for spec in self.environments.specs.values():
            if self.environments.tools_of(spec.shown):
                self.call_form = call_form(self.tokenizer)
            user = {"role": "user", "content": "A"}
            result = result_of({}, "tool", {}).message
            self.encode(json.dumps([user if is_game(spec.shown) else result]))

    def begin(self, examples: Sequence[Example], num_samples: int) -> None:
        """Begin a batch, or begin it again."""
        self.close()
        repeated = [example for example in examples for _ in range(num_samples)]
        self.episodes = [Episode(self.environments, example) for example in repeated]
        self.pool = Pool(self.config.speed.num_reward_workers)

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        """Ask for the answer to a turn. `ids` has all tokens of the completion up to its end."""
        episode = self.episodes[sequence]
        text = episode.take_turn(ids, self.tokenizer)
        answer = partial(episode.answer, text, self.call_form)
        self.pool.submit(sequence, answer, episode.spec.timeout_s)

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
        """The tokens of the answers that have come, by sequence; an empty one ends the dialogue.

        With `wait`, there is at least one answer if a turn was submitted.
        """
        answers: dict[int, Sequence[int]] = {}
        for sequence, messages, error in self.pool.ended(wait=wait):
            episode = self.episodes[sequence]
            if error:
                self._fail(episode, error)
                answers[sequence] = []
            else:
                answers[sequence] = self._receive(episode, messages)
        return answers

    def finish(self, completions: Completions) -> list[list[Completion]]:
        """The dialogues of the batch, `[P][G]`, with the rewards of their environments."""
        rows = completions.completion_ids.flatten(0, 1).tolist()
        lengths = completions.completion_len.flatten().tolist()
        for episode, ids, length in zip(self.episodes, rows, lengths, strict=True):
            if length > episode.num_tokens:  # cut off within a turn
                episode.take_turn(ids[:length], self.tokenizer)
            if self.environments.reward_weights and not episode.error:
                self.pool.submit(episode, episode.score, episode.spec.timeout_s)
        for episode, reward, error in self.pool.all():
            if error:
                self._fail(episode, error)
            episode.final = reward
        for episode in self.episodes:
            for result in episode.results:
                if result.error:
                    warning = f"tool {result.name}: {failure(result.error)}; the model reads it"
                    self._warn_once(result.name, warning)
        texts = [episode.completion() for episode in self.episodes]
        size = completions.completion_ids.shape[1]
        return [texts[start : start + size] for start in range(0, len(texts), size)]

    def close(self) -> None:
        """Close the environments of the batch, when the calls in work have ended or are late."""
        for _ in self.pool.all():
            pass
        for episode in self.episodes:
            self.pool.submit(episode, episode.session.close, episode.spec.timeout_s)
        for episode, _, error in self.pool.all():
            if error:
                where = f"environment {episode.spec.name}.close"
                self._warn_once("close", f"{where}: {failure(error)}")
        self.pool.close()
        self.episodes = []

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self.warned:
            self.warned.add(about)
            self.warn(text)

    def _fail(self, episode: Episode, error: BaseException) -> None:
        """Note an error; sys.exit() raises one too."""
        episode.error = failure(error)
        advice = "such a dialogue counts as the worst of its group"
        self._warn_once("error", f"environment: {episode.error}; {advice}")

    def _receive(self, episode: Episode, messages: list[Message]) -> list[int]:
        """Add an answer to the messages. Returns its tokens, or none if the dialogue has ended."""
        episode.messages += messages
        if episode.over or not messages:
            return []
        args = template_args(episode.example)
        try:
            ids = self.encode(json.dumps(messages), json.dumps(args), episode.is_closed)
        except Exception as error:  # the answer spells a special token
            self._fail(episode, error)
            return []
        limits = self.config.sampling
        num_tokens = episode.num_tokens + len(ids)  # fewer than all: a turn must follow
        if len(episode.turns) == limits.max_turns or num_tokens >= limits.max_new_tokens:
            episode.cut = True
            return []
        episode.num_tokens = num_tokens
        return ids

    def _encode(self, messages: str, args: str = "{}", is_closed: bool = True) -> list[int]:
        """The tokens of answers, up to where the next turn begins; for `args` see `template_args`.

        A turn that is not closed gets the end that the template writes.
        """
        answers = json.loads(messages)
        chat = self.tokenizer.chat
        if not chat:
            # A dialogue goes on after at least one token.
            return self.tokenizer.encode("".join(answer["content"] for answer in answers) or "\n")
        text = chat.between(answers, json.loads(args))
        if not is_closed:
            return self.tokenizer.encode(text, special=True)
        # The end was sampled. It may swallow white space after it, as Phi's does: so it is encoded
        # with the text, and left out.
        ids = self.tokenizer.encode(text.lstrip(), special=True)
        has_end = ids[:1] == [self.tokenizer.special.get(chat.turn_end)]
        return ids[1:] if has_end else ids


def call_form(tokenizer: Tokenizer) -> CallForm:
    """The form in which the chat template writes a call. Raises ConfigError if none is known."""
    chat = tokenizer.chat
    if not chat:
        raise ConfigError(f"tools: --tokenizer {tokenizer.name} has no chat template")
    arguments = {"word": "tea", "other": "green tea"}  # some forms have only texts
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    asked = {"role": "user", "content": "A"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = chat.render([asked, answer], add_generation_prompt=False)
    prompt = chat.render([asked])
    start = len(prompt)
    while not whole.startswith(prompt[:start]):
        start -= 1
    written = tokenizer.decode(tokenizer.encode(whole[start:], special=True))
    for form in FORMS:
        if form.find(written) == [("look_up", arguments)]:
            return form
    raise ConfigError(f"tools: {chat.name} writes calls that are not read here: {written!r:.80}")

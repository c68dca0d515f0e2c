"""Dialogues: completions of several turns, with answers as the chat template writes them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from ..config import Config
from ..runtime.calls import Pool
from ..text.chat import TURN, Message
from ..text.encoding import template_args
from ..text.tokenizer import Tokenizer
from ..types import Completion, Completions, ConfigError, Example, Warn
from ..userfiles import failure
from .environments import EnvironmentSet, Episode
from .tools import CALL_ID, FORMS, CallForm, result_of


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
            if spec.schemas:
                self.call_form = call_form(self.tokenizer)
            result = result_of({}, "tool", {}).message
            self.encode(json.dumps([TURN[0] if spec.is_game else result]))

    def begin(self, examples: Sequence[Example], num_samples: int) -> None:
        self.close()
        repeated = [example for example in examples for _ in range(num_samples)]
        self.episodes = [Episode(self.environments.spec_of(each), each) for each in repeated]
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
        return {
            sequence: self._receive(self.episodes[sequence], messages, error)
            for sequence, messages, error in self.pool.ended(wait=wait)
        }

    def finish(self, completions: Completions) -> list[list[Completion]]:
        """The dialogues of the batch, `[P][G]`, with the rewards of their environments."""
        rows = completions.completion_ids.flatten(0, 1).tolist()
        lengths = completions.completion_len.flatten().tolist()
        for episode, ids, length in zip(self.episodes, rows, lengths, strict=True):
            if length > episode.num_tokens:  # cut off within a turn
                episode.take_turn(ids[:length], self.tokenizer)
                episode.cut = True
            if episode.spec.has_reward and not episode.error:
                self.pool.submit(episode, episode.score, episode.spec.timeout_s)
        for episode, reward, error in self.pool.all():
            episode.final = reward
            if error:
                self._fail(episode, error)
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
        self.pool.drop()
        for _ in self.pool.all():
            pass
        for episode in self.episodes:
            self.pool.submit(episode, episode.close, episode.spec.timeout_s)
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
        episode.error = failure(error)
        episode.final = math.nan
        advice = "such a dialogue counts as the worst of its group"
        self._warn_once("error", f"environment: {episode.error}; {advice}")

    def _receive(
        self,
        episode: Episode,
        messages: list[Message],
        error: BaseException | None,
    ) -> list[int]:
        """Add an answer to the messages. Returns its tokens, or none if the dialogue has ended."""
        if error:
            self._fail(episode, error)
            return []
        episode.messages += messages
        if episode.over or not messages:
            return []
        args = template_args(episode.example)
        try:
            ids = self.encode(json.dumps(messages), json.dumps(args), episode.is_closed)
        except Exception as refusal:  # the answer spells a special token
            self._fail(episode, refusal)
            return []
        limits = self.config.sampling
        num_tokens = episode.num_tokens + len(ids)  # fewer than all: a turn must follow
        if len(episode.turns) == limits.max_turns or num_tokens >= limits.max_new_tokens:
            episode.cut = True
            return []
        episode.num_tokens = num_tokens
        return ids

    def _encode(
        self,
        messages: str,
        args: str = "{}",
        is_closed: bool = True,
    ) -> list[int]:
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
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = chat.render([TURN[0], answer], add_generation_prompt=False)
    prompt = chat.render(TURN[:1])
    start = len(prompt)
    while not whole.startswith(prompt[:start]):
        start -= 1
    written = tokenizer.decode(tokenizer.encode(whole[start:], special=True))
    for form in FORMS:
        if form.find(written) == [("look_up", arguments)]:
            return form
    raise ConfigError(f"tools: {chat.name} writes calls that are not read here: {written!r:.80}")

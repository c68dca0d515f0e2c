"""Tokenize texts into padded rows of tokens, and decode completions.

Prompt and completion are encoded separately: together, one token may span the boundary. Training
uses the sampled tokens. It never re-encodes their text, because that could give other tokens than
those whose log-probs were recorded.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import refusing
from ..types import Completions, ConfigError, Example
from .chat import Message
from .tokenizer import Tokenizer

PARTIAL = "\ufffd"  # stands for bytes that are no whole character yet


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad R lists of tokens; return `[R, L]` int64 and their lengths, `[R]` int64."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True), torch.tensor([len(row) for row in rows])


def to_completions(
    prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]
) -> Completions:
    """Lists of tokens as tensors: P prompts, none of them empty, and `[P][G]` completions."""
    ids, lengths = pad([row for group in rows for row in group])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    groups = (len(prompts), -1)
    return Completions(*pad(prompts), ids.unflatten(0, groups), mask.unflatten(0, groups))


def messages_of(tokenizer: Tokenizer, example: Example) -> Sequence[Message]:
    """The messages of which the chat template writes a prompt; none if the prompt is plain text.

    A plain prompt is a user's message if there is a --system message, or if a dialogue follows. It
    stays plain otherwise, whether or not the tokenizer has a template: base models have one too.
    """
    in_turns = tokenizer.chat and (tokenizer.chat.system or example.tools is not None)
    if example.messages or not in_turns:
        return example.messages
    return ({"role": "user", "content": example.prompt},)


def template_args(example: Example) -> Mapping[str, Any]:
    """What a row says of the chat template's variables; it counts above --chat-args."""
    return example.fields.get("chat_template_kwargs") or {}


def prompt_text(tokenizer: Tokenizer, example: Example) -> str:
    """The text of a plain prompt, or what the chat template writes."""
    messages = messages_of(tokenizer, example)
    if not messages:
        return example.prompt
    if tokenizer.chat is None:
        raise ConfigError(f"messages: --tokenizer {tokenizer.name} has no chat template")
    return tokenizer.chat.prompt(messages, example.tools or (), template_args(example))


def encode_prompt(tokenizer: Tokenizer, example: Example, room: float = math.inf) -> list[int]:
    """The tokens of a prompt. `room`: see `_encode`."""
    text = prompt_text(tokenizer, example)
    if messages_of(tokenizer, example):
        return _encode(tokenizer, text, room, special=True)
    return [*tokenizer.prefix, *_encode(tokenizer, text, room)]


def encode_answer(tokenizer: Tokenizer, example: Example, room: float = math.inf) -> list[int]:
    """The tokens of the true answer; one to messages ends as a turn of the chat template does."""
    end = tokenizer.turn_end if messages_of(tokenizer, example) else tokenizer.eot
    with refusing(f"{example.label}, the answer"):
        ids = [*_encode(tokenizer, example.answer, room), end]
        if len(ids) >= room:
            raise ConfigError(f"{len(ids)} tokens do not fit into {room:,}, beside a prompt")
        return ids


def _encode(tokenizer: Tokenizer, text: str, room: float, *, special: bool = False) -> list[int]:
    """The tokens of a text. Raises ConfigError, without reading it, if they must be over `room`."""
    text.encode()  # of half a character, the tokenizer's own error does not say what is wrong
    # a normalizer makes one character of at most four
    if len(text) > 4 * room * tokenizer.longest_token:
        raise ConfigError(f"a text of {len(text):,} characters does not fit into {room:,} tokens")
    return tokenizer.encode(text, special=special)


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[Example], room: int
) -> tuple[Tensor, Tensor]:
    """`pad` of the prompts. Raises ConfigError for one that does not have 1 to `room` tokens."""
    return pad([prompt_within(tokenizer, example, room) for example in examples])


def prompt_within(tokenizer: Tokenizer, example: Example, room: int) -> list[int]:
    """The tokens of a prompt. Raises ConfigError if they are not 1 to `room`."""
    with refusing(example.label):
        ids = encode_prompt(tokenizer, example, room)
        if not 0 < len(ids) <= room:
            said = "leave room in the model's context for an answer"
            raise ConfigError(f"a prompt of {len(ids)} tokens: 1 to {room} {said}")
        return ids


def check_prompt(tokenizer: Tokenizer, example: Example, room: int) -> None:
    """Raise what `prompt_within` raises, in less time: a short text need not be encoded."""
    with refusing(example.label):
        num_bytes = len(prompt_text(tokenizer, example).encode())
    if not 0 < num_bytes + len(tokenizer.prefix) < room:  # each token has a byte, or more
        prompt_within(tokenizer, example, room)


def encode_pairs(tokenizer: Tokenizer, examples: Sequence[Example], context: int) -> Completions:
    """Prompts with their true answers as completions. Raises ConfigError for one over `context`."""
    answers = [encode_answer(tokenizer, example, context) for example in examples]
    prompts = [
        prompt_within(tokenizer, example, context - len(answer))
        for example, answer in zip(examples, answers, strict=True)
    ]
    return to_completions(prompts, [[answer] for answer in answers])


def decode(tokenizer: Tokenizer, completions: Completions) -> list[list[str]]:
    """The texts of completions, `[P][G]`, without the tokens that end them."""
    ids = completions.completion_ids.tolist()
    lengths = completions.completion_len.tolist()
    return [
        [tokenizer.decode(row[:length]) for row, length in zip(*group, strict=True)]
        for group in zip(ids, lengths, strict=True)
    ]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character of several tokens stands with the last of them."""
    before = tokenizer.encode("a")  # SentencePiece drops a space that begins a text
    texts = list[str]()
    start = 0  # of the tokens whose text is still to come
    for end in range(1, len(ids) + 1):
        text = tokenizer.text_of([*before, *ids[start:end]])[1:]
        whole = end == len(ids) or not text.endswith(PARTIAL)
        texts.append(text if whole else "")
        start = end if whole else start
    return texts


class StopTexts:
    """Finds the token that completes a text of --stop in a turn, and perhaps goes on after it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        # a character has at most four bytes, and a token at least one
        self.most_tokens = 4 * max(map(len, texts)) + 1
        self.before = tokenizer.encode("a")  # SentencePiece drops a space that begins a text

    @cached_property
    def candidates(self) -> np.ndarray:
        """`[V]` bool: the tokens that have the last character of a text, or may have."""
        rows = [[*self.before, number] for number in range(self.tokenizer.n_vocab)]
        shown = self.tokenizer.engine.decode_batch(rows, skip_special_tokens=False)
        last = {PARTIAL, *(text[-1] for text in self.texts)}
        return np.array([not last.isdisjoint(text[1:]) for text in shown])

    def completes(self, ids: Sequence[int]) -> bool:
        """Whether the last of a turn's tokens completes one of the texts."""
        recent = [*self.before, *ids[-self.most_tokens :]]
        shown = self.tokenizer.text_of(recent)[1:]
        known = len(self.tokenizer.text_of(recent[:-1])[1:].rstrip(PARTIAL))  # before the last
        return any(text in shown[max(0, known - len(text) + 1) :] for text in self.texts)

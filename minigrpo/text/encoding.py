"""Encode prompts and answers as padded rows of tokens, decode completions, find stop texts.

Prompt and completion are encoded separately, because one token could span the boundary.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import refusing
from ..types import Completion, Completions, ConfigError, Example
from .chat import Message
from .tokenizer import PARTIAL, Tokenizer


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad R lists of tokens; return `[R, L]` int64 and their lengths, `[R]` int64."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in (*rows, [0])]  # so L is at least 1
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(tensors, batch_first=True)[:-1], lengths


def to_completions(
    prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]
) -> Completions:
    """Make tensors of the tokens of P prompts, none of them empty, and of `[P][G]` completions."""
    prompt_ids, prompt_len = pad(prompts)
    ids, lengths = pad([row for group in rows for row in group])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    groups = (len(prompts), -1)
    return Completions(
        prompt_ids,
        prompt_len,
        completion_ids=ids.unflatten(0, groups),
        completion_mask=mask.unflatten(0, groups),
    )


def messages_of(tokenizer: Tokenizer, example: Example) -> Sequence[Message]:
    """The messages that the chat template writes a prompt from; none if it stays a plain text."""
    chat = tokenizer.chat
    in_turns = example.tools is not None  # tools or an environment may answer
    if not example.messages and chat and (chat.system or in_turns):
        return ({"role": "user", "content": example.prompt},)
    return example.messages


def template_args(example: Example) -> Mapping[str, Any]:
    """A row's own variables for the chat template, which override --chat-args."""
    return example.fields.get("chat_template_kwargs") or {}


def prompt_text(tokenizer: Tokenizer, example: Example) -> str:
    """The text of a plain prompt, or the text that the chat template writes."""
    messages = messages_of(tokenizer, example)
    if not messages:
        return example.prompt
    if tokenizer.chat is None:
        missing = f"--tokenizer {tokenizer.name} has no chat template"
        raise ConfigError(f"the prompt has messages, but {missing}: give --chat-template")
    return tokenizer.chat.prompt(messages, example.tools or (), template_args(example))


def encode_prompt(tokenizer: Tokenizer, example: Example) -> list[int]:
    text = prompt_text(tokenizer, example)
    if messages_of(tokenizer, example):
        return tokenizer.encode(text, special=True)
    return [*tokenizer.prefix, *tokenizer.encode(text)]


def encode_answer(tokenizer: Tokenizer, example: Example) -> list[int]:
    # an answer to messages ends as a turn of the chat template does
    end = tokenizer.turn_end if messages_of(tokenizer, example) else tokenizer.eot
    with refusing(f"{example.label}, the answer"):
        return [*tokenizer.encode(example.answer), end]


def prompt_within(tokenizer: Tokenizer, example: Example, room: int) -> list[int]:
    """The tokens of a prompt. Raises ConfigError if it does not have 1 to `room` tokens."""
    with refusing(example.label):
        ids = encode_prompt(tokenizer, example)
        if not ids:
            raise ConfigError("the prompt is empty")
        if len(ids) > room:
            limit = f"the answer leaves {max(room, 0)} of the model's context"
            raise ConfigError(f"the prompt has {len(ids)} tokens; {limit}")
        return ids


def encode_pairs(tokenizer: Tokenizer, examples: Sequence[Example], context: int) -> Completions:
    """Prompts with their true answers as completions. Raises ConfigError if one is too long."""
    answers = [encode_answer(tokenizer, example) for example in examples]
    prompts = [
        prompt_within(tokenizer, example, context - len(answer))
        for example, answer in zip(examples, answers, strict=True)
    ]
    return to_completions(prompts, [[answer] for answer in answers])


def decode(tokenizer: Tokenizer, completions: Completions) -> list[list[Completion]]:
    """The texts of completions of one turn, `[P][G]`, without the tokens that end them."""
    lengths_by_group = completions.completion_len.tolist()
    groups = zip(completions.completion_ids.tolist(), lengths_by_group, strict=True)
    return [
        [Completion(tokenizer.decode(ids[:length])) for ids, length in zip(*group, strict=True)]
        for group in groups
    ]


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """The text of each token by itself; of a part of a character it is U+FFFD."""
    return [tokenizer.text_within([number]) for number in ids]


class StopFinder:
    """Finds the token that completes a text of --stop in a turn; it may go on after the text."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        # a character has at most four bytes, and a token at least one
        self.most_tokens = 4 * max(map(len, texts)) + 1

    @cached_property
    def candidates(self) -> np.ndarray:
        """`[V]` bool, true for tokens that may contain the last character of a stop text."""
        last_characters = {PARTIAL, *(text[-1] for text in self.texts)}
        shown = token_texts(self.tokenizer, range(self.tokenizer.n_vocab))
        return np.array([not last_characters.isdisjoint(text) for text in shown])

    def completes(self, ids: Sequence[int]) -> bool:
        """Whether a turn's last token completes a text; an earlier one would have ended it."""
        recent = self.tokenizer.text_within(ids[-self.most_tokens :])
        return any(text in recent for text in self.texts)

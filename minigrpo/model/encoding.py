"""Tokenize texts into padded rows of tokens, and decode completions.

Prompt and completion are encoded separately. The model is warm-started, sampled and trained on
encode(prompt) + encode(completion), never on encode(prompt + completion), where one token may span
the boundary. Training uses the sampled tokens. It never re-encodes their text, because that could
give different tokens from those whose log-probs were recorded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..runtime.chat_messages import Message
from ..runtime.flags import ConfigError
from ..types import Completions, Example
from .tokenizer import Tokenizer


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad R lists of tokens; return `[R, L]` int64 and their lengths, `[R]` int64."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids), torch.from_numpy(lengths)


def messages_of(tokenizer: Tokenizer, example: Example) -> Sequence[Message]:
    """The messages of which the chat template writes a prompt; none if the prompt is plain text.

    A plain prompt is a user's message if there is a --system message, and stays plain otherwise,
    whether or not the tokenizer has a template: base models have one too.
    """
    if example.messages or not (tokenizer.chat and tokenizer.chat.system):
        return example.messages
    return ({"role": "user", "content": example.prompt},)


def prompt_text(tokenizer: Tokenizer, example: Example) -> str:
    """A prompt as the model gets it. Raises ValueError, which does not name the example."""
    if messages := messages_of(tokenizer, example):
        return tokenizer.template("messages").render(messages)
    return example.prompt


def encode_prompt(tokenizer: Tokenizer, example: Example) -> list[int]:
    """The tokens of a prompt. Raises ValueError, which does not name the example."""
    if messages := messages_of(tokenizer, example):
        return tokenizer.template("messages").encode(messages, tokenizer)
    return tokenizer.encode_prompt(example.prompt)


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[Example], room: int
) -> tuple[Tensor, Tensor]:
    """Return the prompts as right-padded ids, `[P, Lp]` int64, and their lengths, `[P]` int64.

    Args:
        room: how many tokens a prompt may have.

    Raises:
        ConfigError: a prompt is empty, or longer than its room, or the chat template refuses it.
            (Most such prompts are found by `runtime.examples.check_examples` before a run starts.)
    """
    rows = list[list[int]]()
    for example in examples:
        try:
            rows.append(encode_prompt(tokenizer, example))
        except ValueError as error:
            raise ConfigError(f"{name_of(example)}: {error}") from None
    ids, lengths = pad(rows)
    worst, shortest = int(lengths.argmax()), int(lengths.argmin())
    if int(lengths[worst]) > room:
        raise ConfigError(
            f"{name_of(examples[worst])}: the prompt has {int(lengths[worst])} tokens; at most "
            f"{room} leave room for its completion in the model's --context"
        )
    if not int(lengths[shortest]):
        raise ConfigError(
            f"{name_of(examples[shortest])}: the prompt is empty; the last token of a prompt "
            "predicts the first of its completion"
        )
    return ids, lengths


def encode_pairs(tokenizer: Tokenizer, examples: Sequence[Example], context: int) -> Completions:
    """Return the prompts with their true answers as completions, one per prompt.

    Args:
        context: the model's number of positions, for a prompt and its own answer together.

    Raises:
        ConfigError: a prompt is empty, or does not fit with its answer.
    """
    prompt_ids, prompt_len = encode_prompts(tokenizer, examples, context - 1)
    ids, lengths = encode_answers(tokenizer, examples)
    excess = prompt_len + lengths - context
    if int(excess.max()) > 0:
        worst = int(excess.argmax())
        size, prompt = int(lengths[worst]) - 1, int(prompt_len[worst])  # without end of text
        raise ConfigError(
            f"{name_of(examples[worst])}: the answer has {size} tokens; at most "
            f"{context - prompt - 1} fit the model's context of {context} after the prompt's "
            f"{prompt}"
        )
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return Completions(prompt_ids, prompt_len, ids[:, None], mask[:, None])


def name_of(example: Example) -> str:
    """How an error names an example: the file and the call of a user's task, else its text."""
    where: str = getattr(example, "where", "")
    return where or f"example {example.index} ({example.prompt[:60]!r}...)"


def encode_answers(tokenizer: Tokenizer, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return the true answers as right-padded ids, `[P, L]` int64, and their lengths, `[P]` int64.

    An answer to messages ends as a turn of the chat template does, any other with end of text.
    """
    rows = list[list[int]]()
    for example in examples:
        end = tokenizer.turn_end if messages_of(tokenizer, example) else tokenizer.eot
        rows.append([*tokenizer.encode(example.answer), end])
    return pad(rows)


def decode(tokenizer: Tokenizer, completions: Completions) -> list[list[str]]:
    """Return the texts of completions, `[P][G]`, without the tokens that end them."""
    ids, lengths = completions.completion_ids.numpy(), completions.completion_mask.sum(-1).numpy()
    return [
        [tokenizer.decode(row[:n].tolist()) for row, n in zip(group, ns, strict=True)]
        for group, ns in zip(ids, lengths, strict=True)
    ]

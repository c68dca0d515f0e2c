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


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[Example], room: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the prompts as right-padded ids, `[P, Lp]` int64, and their lengths, `[P]` int64.

    Args:
        room: how many tokens a prompt may have, or `[P]` int64, one number for each.

    Raises:
        ConfigError: a prompt is empty, or longer than its room. (Most such prompts are found by
            `runtime.examples.check_examples` before a run starts.)
    """
    ids, lengths = pad([tokenizer.encode_prompt(example.prompt) for example in examples])
    excess = lengths - room
    if int(excess.max()) > 0:
        worst = int(excess.argmax())
        size, most = int(lengths[worst]), int((lengths - excess)[worst])
        raise ConfigError(
            f"a prompt of {size} tokens leaves no room for its completion in the model's "
            f"--context: at most {most} are allowed ({examples[worst].prompt[:60]!r}...)"
        )
    if not int(lengths.min()):
        raise ConfigError(
            "a prompt is empty: the last token of a prompt predicts the first of its completion"
        )
    return ids, lengths


def encode_answers(tokenizer: Tokenizer, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return the true answers, with end-of-text tokens, as right-padded ids, `[P, L]` int64, and
    their lengths, `[P]` int64.
    """
    return pad([[*tokenizer.encode(example.answer), tokenizer.eot] for example in examples])


def decode(tokenizer: Tokenizer, completions: Completions) -> list[list[str]]:
    """Return the texts of completions, `[P][G]`, without the end-of-text token."""
    ids, lengths = completions.completion_ids.numpy(), completions.completion_mask.sum(-1).numpy()
    return [
        [tokenizer.decode(row[:n].tolist()) for row, n in zip(group, ns, strict=True)]
        for group, ns in zip(ids, lengths, strict=True)
    ]

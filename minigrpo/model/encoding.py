"""From texts to padded rows of tokens and back.

Prompt and completion are encoded apart: a model is warm-started, sampled and trained on
encode(prompt) + encode(completion), never on encode(prompt + completion), which may have one token
across the boundary. What was sampled is trained on as the tokens that were sampled, not as their
text encoded again.
"""

from collections.abc import Sequence

import numpy as np
import tiktoken
import torch
from torch import Tensor

from ..runtime.flags import ConfigError
from ..types import Completions, Example


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad token lists: `[R, L]` int64 and their lengths `[R]`."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids), torch.from_numpy(lengths)


def encode_prompts(
    tokenizer: tiktoken.Encoding, examples: Sequence[Example], room: int
) -> tuple[Tensor, Tensor]:
    """Prompts as right-padded ids `[P, Lp]` and lengths `[P]`. Raises ConfigError for one longer
    than `room` tokens.
    """
    ids, lengths = pad([tokenizer.encode_ordinary(example.prompt) for example in examples])
    if int(lengths.max()) > room:
        worst = examples[int(lengths.argmax())].prompt
        raise ConfigError(
            f"a prompt of {int(lengths.max())} tokens leaves no room for --max-new-tokens in the "
            "model's --context: at most "
            f"{room} are allowed ({worst[:60]!r}...)"
        )
    if not int(lengths.min()):
        raise ConfigError(
            "a prompt is empty: the first token of a completion is predicted by the prompt's last"
        )
    return ids, lengths


def encode_answers(
    tokenizer: tiktoken.Encoding, examples: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """True completions, end of text included, as right-padded ids `[P, L]` and lengths `[P]`."""
    return pad(
        [[*tokenizer.encode_ordinary(example.answer), tokenizer.eot_token] for example in examples]
    )


def decode(tokenizer: tiktoken.Encoding, completions: Completions) -> list[list[str]]:
    """The texts of completions, without end of text: `[P][G]`."""
    ids, lengths = completions.completion_ids.numpy(), completions.completion_mask.sum(-1).numpy()
    eos = tokenizer.eot_token
    return [
        [
            tokenizer.decode([t for t in row[:n].tolist() if t != eos])
            for row, n in zip(group, ns, strict=True)
        ]
        for group, ns in zip(ids, lengths, strict=True)
    ]

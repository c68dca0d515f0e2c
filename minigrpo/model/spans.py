"""Find the tagged parts of completions, such as <think>..</think>, as spans of tokens.

Tags are looked for in the bytes that the tokens stand for. So it does not matter whether a tag is
one token, several, or shares a token with its neighbours: the same tag is often split in several
ways, because a tokenizer merges its last character with the text that follows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..types import Completions
from .tokenizer import Tokenizer

MISSING = (-1, -1)


def find_spans(
    tokenizer: Tokenizer, completions: Completions, tag: str, *, with_tags: bool = False
) -> Tensor:
    """The tokens between the first <tag> of each completion and the next </tag> after it.

    A token that holds part of a tag belongs to the tag: the span has only the tokens whose bytes
    are all between the tags. So a span may lack a few characters of the text between them.

    Args:
        tag: the name without brackets, such as `think`.
        with_tags: return the span from the token in which <tag> begins to the one in which </tag>
            ends; it lacks nothing of the text.

    Returns:
        `[P, G, 2]` int64 on the host: first token and the one after the last. They are equal if
        there is nothing between the tags, and -1, -1 if one of the tags is missing.

    Raises:
        ValueError: `tag` is not a name.
    """
    if not tag or set(tag) & set("<>/"):
        raise ValueError(f"tag must be a name without < > /, such as think, got {tag!r}")
    tags = f"<{tag}>".encode(), f"</{tag}>".encode()
    ids, lengths = completions.completion_ids.tolist(), completions.completion_mask.sum(-1).tolist()
    return torch.tensor(
        [
            [
                _span([tokenizer.decode_bytes([number]) for number in row[:n]], tags, with_tags)
                for row, n in zip(group, ns, strict=True)
            ]
            for group, ns in zip(ids, lengths, strict=True)
        ]
    )


def _span(pieces: Sequence[bytes], tags: tuple[bytes, bytes], with_tags: bool) -> tuple[int, int]:
    """The span in a completion whose tokens stand for `pieces`.

    >>> _span([b"<thi", b"nk>a", b"b", b"c</think>"], (b"<think>", b"</think>"), False)
    (2, 3)
    >>> _span([b"<thi", b"nk>a", b"b", b"c</think>"], (b"<think>", b"</think>"), True)
    (0, 4)
    """
    (opening, closing), text = tags, b"".join(pieces)
    begin = text.find(opening)
    after_opening = begin + len(opening)
    end = text.find(closing, after_opening) if begin >= 0 else -1
    if end < 0:
        return MISSING
    ends = np.cumsum([len(piece) for piece in pieces])
    if with_tags:
        first = int(np.searchsorted(ends, begin, side="right"))
        return first, int(np.searchsorted(ends, end + len(closing))) + 1
    starts = np.concatenate([[0], ends[:-1]])
    first = int(np.searchsorted(starts, after_opening))
    return first, max(first, int(np.searchsorted(ends, end, side="right")))

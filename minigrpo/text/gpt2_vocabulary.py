"""GPT-2's vocabulary: tiktoken fetches it, and the `tokenizers` package runs it.

tiktoken stores a rank for each token, and no merges. It joins the two neighbours whose joined bytes
have the lowest rank, until no neighbours are a token. If a token's own bytes are joined in this
way, the last step joins two parts: they are the merge that makes the token.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ..errors import refusing

GPT2 = "gpt2"
END_OF_TEXT = "<|endoftext|>"
# Each byte has the name of a printable character: the byte's own, or one from 256 on.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = sorted(range(256), key=lambda byte: chr(byte) not in ALPHABET)  # in the same order
CHARACTERS = dict(zip(BYTES, ALPHABET, strict=True))


def gpt2_engine() -> tokenizers.Tokenizer:
    """GPT-2's tokenizer. Raises ConfigError if its vocabulary is neither stored nor fetched."""
    with refusing("GPT-2's vocabulary cannot be fetched"):
        encoding = tiktoken.get_encoding(GPT2)
    ranks = encoding._mergeable_ranks  # ids 0 to n - 1; the lower of two is merged first
    special = encoding._special_tokens  # ids from n on
    vocabulary = {}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        vocabulary[character_names(token)] = ranks[token]
        if len(token) > 1:
            merges.append(halves(token, ranks))
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(sorted(special, key=special.__getitem__))
    return engine


def character_names(token: bytes) -> str:
    """A token as tokenizer.json writes it."""
    return "".join(CHARACTERS[byte] for byte in token)


def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[str, str]:
    """The names of the two pieces whose merge makes a token of two bytes or more."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        joined = [first + second for first, second in pairwise(pieces)]
        joined_ranks = [ranks.get(token, math.inf) for token in joined]
        place = joined_ranks.index(min(joined_ranks))
        pieces[place : place + 2] = [joined[place]]
    first, second = pieces
    return character_names(first), character_names(second)

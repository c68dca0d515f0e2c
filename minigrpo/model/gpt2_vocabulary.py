"""GPT-2's vocabulary: tiktoken fetches it, and the `tokenizers` package runs it.

tiktoken knows a rank for each token, and no merges. It joins the neighbours whose bytes together
have the lowest rank, again and again. So the merge that makes a token joins the two parts that are
left of its own bytes before the last step.
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
# Each byte is named by a character that can be printed: by itself, or by one from 256 on.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = sorted(range(256), key=lambda byte: chr(byte) not in ALPHABET)  # in the same order
CHARACTERS = dict(zip(BYTES, ALPHABET, strict=True))


def gpt2_engine() -> tokenizers.Tokenizer:
    """GPT-2's tokenizer. Raises ConfigError if its vocabulary is neither stored nor fetched."""
    with refusing("GPT-2's vocabulary cannot be fetched"):
        encoding = tiktoken.get_encoding(GPT2)
    ranks = encoding._mergeable_ranks  # ids 0 to n - 1; the lower of two is merged first
    special = encoding._special_tokens  # ids from n on
    tokens = sorted(ranks, key=ranks.__getitem__)
    vocabulary = {name_of(token): ranks[token] for token in tokens}
    merges = [halves(token, ranks) for token in tokens if len(token) > 1]
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(sorted(special, key=special.__getitem__))
    return engine


def name_of(token: bytes) -> str:
    """A token as tokenizer.json writes it."""
    return "".join(CHARACTERS[byte] for byte in token)


def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[str, str]:
    """The names of the two parts whose merge makes a token of two bytes or more."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [first + second for first, second in pairwise(parts)]
        place = min(range(len(joined)), key=lambda place: ranks.get(joined[place], math.inf))
        parts[place : place + 2] = [joined[place]]
    return name_of(parts[0]), name_of(parts[1])

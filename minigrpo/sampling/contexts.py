"""What followed a context in known texts: for each context, the tokens seen after it.

A context is the last few tokens before a place. It is stored as a hash, to which `drafts.py` adds
where the context counts, such as one prompt. Two contexts with the same hash would only propose
each other's tokens, which is harmless: no proposal is kept unless sampling picks it too.

The tokens that followed a context are an empirical distribution, and u picks from it by the inverse
CDF, in the order in which `pick_token` adds up probabilities. If the distribution is nearly the
model's, so is the pick: the proposal is right far more often than the likeliest token would be.
"""

import numpy as np

TOKEN_BITS = 20  # of an entry; the other 44 bits are the context's
TOKEN_MASK = np.uint64((1 << TOKEN_BITS) - 1)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers are distinct modulo 2^64


def powers(number: int) -> np.ndarray:
    """`[number]` uint64: FACTOR, FACTOR^2, .. modulo 2^64."""
    return np.multiply.accumulate(np.full(number, FACTOR))


def hash_contexts(tokens: np.ndarray, size: int, longest: int) -> np.ndarray:
    """The hashes of the `size` tokens before each token.

    Args:
        tokens: `[R, longest + S]`; the first `longest` only serve as contexts, -1 where a text has
            not begun.

    Returns:
        `[R, S]` uint64.
    """
    numbers = (tokens + 1).astype(np.uint64)
    columns = tokens.shape[1] - longest
    hashes = np.zeros((len(tokens), columns), dtype=np.uint64)
    for back, power in enumerate(powers(size), 1):
        hashes += numbers[:, longest - back : longest - back + columns] * power
    return hashes


def hash_recent(recent: np.ndarray) -> np.ndarray:
    """The hashes of the last 0, 1, .. tokens of `recent [N, longest]`: `[N, longest + 1]` uint64.

    They are those of `hash_contexts` for a token that would come next.
    """
    reverse = (recent[:, ::-1] + 1).astype(np.uint64) * powers(recent.shape[1])
    hashes = np.zeros((len(recent), recent.shape[1] + 1), dtype=np.uint64)
    np.cumsum(reverse, axis=1, out=hashes[:, 1:])
    return hashes


class ContextTable:
    """For each known context, the tokens that followed it, sorted."""

    def __init__(self, contexts: np.ndarray, tokens: np.ndarray) -> None:
        """`contexts [E]` uint64 and the token that followed each, `[E]`."""
        # one entry more, so that no array is empty; no text has its context
        entries = np.append((contexts & ~TOKEN_MASK) | tokens.astype(np.uint64), ~np.uint64(0))
        entries.sort()
        self.tokens = (entries & TOKEN_MASK).astype(np.int64)  # [E]
        # [C] distinct contexts, and where the tokens of each start
        self.contexts, self.starts = np.unique(entries >> np.uint64(TOKEN_BITS), return_index=True)
        self.counts = np.diff(self.starts, append=len(entries))  # [C]
        # a hash table: of contexts that share a place, all but one are forgotten
        places = 1 << int(2 * len(self.contexts)).bit_length()
        self.place_mask = np.uint64(places - 1)
        self.at_place = np.zeros(places, dtype=np.int64)
        places_of = (self.contexts & self.place_mask).view(np.int64)
        self.at_place[places_of[:-1]] = np.arange(len(self.contexts) - 1)

    def find(self, contexts: np.ndarray, u: np.ndarray) -> np.ndarray:
        """`[N, K]`, the tokens at the share `u [N]` of those that followed `contexts [N, K]`.

        -1 where a context is not known.
        """
        contexts = contexts >> np.uint64(TOKEN_BITS)
        numbers = self.at_place[(contexts & self.place_mask).view(np.int64)]
        entry = self.starts[numbers] + (u[:, None] * self.counts[numbers]).astype(np.int64)
        return np.where(self.contexts[numbers] == contexts, self.tokens[entry], -1)

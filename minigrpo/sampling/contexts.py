"""What followed a context in known texts: for each context, the tokens seen after it.

A context is the last few tokens before a place. It is stored as a hash, to which `drafts.py` adds
where the context counts, such as one prompt. Two contexts with the same hash would only propose
each other's tokens, which is harmless: no proposal is kept unless sampling picks it too.

The tokens that followed a context are an empirical distribution, and u picks from it by the inverse
CDF, in the order in which `pick_token` adds up probabilities. If the distribution is nearly the
model's, so is the pick: the proposal is right far more often than the likeliest token would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_BITS = 20  # of an entry; the other 44 bits are the context's
TOKEN_MASK = np.uint64((1 << TOKEN_BITS) - 1)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers are distinct modulo 2^64
NUM_MARGINS = 8


def powers(number: int) -> np.ndarray:
    """`[number]` uint64: FACTOR, FACTOR^2, .. modulo 2^64."""
    return np.multiply.accumulate(np.full(number, FACTOR))


def hash_rows(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A hash of the first `lengths [R]` tokens of each row of `tokens [R, L]`: `[R]` uint64."""
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    numbers = np.where(real, tokens + 1, 0).astype(np.uint64)
    hashes: np.ndarray = (numbers * powers(tokens.shape[1])).sum(1) * FACTOR
    return hashes


def hash_contexts(tokens: np.ndarray, sizes: Sequence[int], longest: int) -> np.ndarray:
    """The hashes of the contexts before each token.

    Args:
        tokens: `[R, longest + S]`; the first `longest` only serve as contexts, -1 where a text has
            not begun.
        sizes: how many tokens each of K kinds of contexts has.

    Returns:
        `[R, S, K]` uint64.
    """
    numbers = (tokens + 1).astype(np.uint64)
    columns = tokens.shape[1] - longest
    found = np.zeros((len(tokens), columns, len(sizes)), dtype=np.uint64)
    hashes = np.zeros((len(tokens), columns), dtype=np.uint64)
    for back, power in enumerate(powers(longest), 1):
        hashes += numbers[:, longest - back : longest - back + columns] * power
        for kind, size in enumerate(sizes):
            if size == back:
                found[:, :, kind] = hashes
    return found


def hash_recent(recent: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`hash_contexts` of what follows `recent [N, longest]` alone: `[N, K]` uint64."""
    reverse = (recent[:, ::-1] + 1).astype(np.uint64) * powers(recent.shape[1])
    hashes = np.zeros((len(recent), recent.shape[1] + 1), dtype=np.uint64)
    np.cumsum(reverse, axis=1, out=hashes[:, 1:])
    return hashes[:, sizes]


@dataclass(frozen=True)
class Candidates:
    """The tokens that a table proposes after N x K contexts."""

    tokens: np.ndarray  # [N, K] int64, -1 where the context is not known
    # [N, K], 0 to NUM_MARGINS - 1: how far u is from a share at which the token would be another,
    # in half standard deviations of that share
    margins: np.ndarray


class ContextTable:
    """For each known context, the tokens that followed it, sorted."""

    def __init__(self, contexts: np.ndarray, tokens: np.ndarray) -> None:
        """`contexts [E]` uint64 and the token that followed each, `[E]`."""
        # one entry more, so that no array is empty; no text has its context
        entries = np.append((contexts & ~TOKEN_MASK) | tokens.astype(np.uint64), ~np.uint64(0))
        entries.sort()
        contexts = entries >> np.uint64(TOKEN_BITS)
        self.tokens = (entries & TOKEN_MASK).astype(np.int64)  # [E]
        _, self.starts = _runs(contexts)
        self.contexts = contexts[self.starts]  # [C], distinct
        self.counts = np.diff(self.starts, append=len(entries))  # [C]
        # [E] the first entry that equals each, and the first after it that does not
        number, firsts = _runs(entries)
        self.first, self.last = firsts[number], np.append(firsts[1:], len(entries))[number]
        # a hash table: of contexts that share a place, all but one are forgotten
        places = 1 << int(2 * len(self.contexts)).bit_length()
        self.place_mask = np.uint64(places - 1)
        self.at_place = np.zeros(places, dtype=np.int64)
        places_of = (self.contexts & self.place_mask).view(np.int64)
        self.at_place[places_of[:-1]] = np.arange(len(self.contexts) - 1)

    def find(self, contexts: np.ndarray, u: np.ndarray) -> Candidates:
        """The tokens at the share `u [N]` of those that followed `contexts [N, K]`."""
        contexts = contexts >> np.uint64(TOKEN_BITS)
        numbers = self.at_place[(contexts & self.place_mask).view(np.int64)]
        n, k = np.nonzero(self.contexts[numbers] == contexts)
        numbers, share = numbers[n, k], u[n]
        start, count = self.starts[numbers], self.counts[numbers]
        entry = start + np.minimum((share * count).astype(np.int64), count - 1)
        tokens = np.full(contexts.shape, -1)
        tokens[n, k] = self.tokens[entry]
        below, above = (self.first[entry] - start) / count, (self.last[entry] - start) / count
        margin = np.minimum(
            (share - below) / _deviation(below, count), (above - share) / _deviation(above, count)
        )
        margins = np.zeros(contexts.shape, dtype=np.int64)
        margins[n, k] = np.clip(2 * margin, 0, NUM_MARGINS - 1)
        return Candidates(tokens, margins)


def _runs(sorted_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each number, the number of its run of equal ones; and where each run starts."""
    begins = np.append(True, sorted_numbers[1:] != sorted_numbers[:-1])
    return begins.cumsum() - 1, np.flatnonzero(begins)


def _deviation(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The standard deviation of a share of `count` draws, at least 1 / count."""
    deviation: np.ndarray = np.sqrt((share * (1 - share) + 1 / count) / count)
    return deviation

"""Which examples are held out for evaluation: a hash of the question decides.

The decision depends on the question alone, not on its place in a file or on the seed. So a question
that occurs twice is never in both splits, and every run of every task agrees on what is held out.
"""

import hashlib
from collections.abc import Iterable

POSITIONS_PER_HELD_OUT = 4  # one chess position in 4 is held out
PROMPTS_PER_HELD_OUT = 10  # one prompt in 10, in a file of prompts and answers


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process (Python's `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def position_key(fen: str) -> str:
    """Return a FEN without its clocks: a position that recurs later counts as the same."""
    return " ".join(fen.split(" ")[:4])


def is_held_out(fen: str) -> bool:
    """Return whether a chess position is held out; its clocks do not matter."""
    return (fingerprint(position_key(fen)) >> 56) % POSITIONS_PER_HELD_OUT == 0


def split_of(spellings: Iterable[str]) -> bool | None:
    """Return whether a chess position that can be written in several ways is held out.

    Self-play and games write an en passant square after every double step. A file may leave out a
    square where no pawn can capture. The two FENs have different hashes, so a question could be
    trained on in one spelling and evaluated in the other.

    Returns:
        None if the spellings disagree: the position then belongs in neither split.
    """
    decisions = {is_held_out(fen) for fen in spellings}
    return decisions.pop() if len(decisions) == 1 else None


def is_held_out_prompt(prompt: str) -> bool:
    """Return whether a prompt is held out."""
    return fingerprint(prompt) % PROMPTS_PER_HELD_OUT == 0

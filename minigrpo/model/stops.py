"""Texts that end a completion, for --stop."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .tokenizer import Tokenizer

PARTIAL = "\ufffd"  # stands for bytes that are no whole character yet


class StopTexts:
    """Finds the token that completes one of the texts in a turn, and perhaps goes on after it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        # a character has at most four bytes, and a token at least one
        self.most_tokens = 4 * max(map(len, texts)) + 1
        self.before = tokenizer.encode("a")  # SentencePiece drops a space that begins a text

    @cached_property
    def candidates(self) -> np.ndarray:
        """`[V]` bool: the tokens that have the last character of a text, or may have."""
        rows = [[*self.before, number] for number in range(self.tokenizer.n_vocab)]
        shown = self.tokenizer.engine.decode_batch(rows, skip_special_tokens=False)
        last = {PARTIAL, *(text[-1] for text in self.texts)}
        return np.array([not last.isdisjoint(text[1:]) for text in shown])

    def completes(self, ids: Sequence[int]) -> bool:
        """Whether the last of a turn's tokens completes one of the texts."""
        recent = [*self.before, *ids[-self.most_tokens :]]
        shown = self.tokenizer.text_of(recent)[1:]
        known = len(self.tokenizer.text_of(recent[:-1])[1:].rstrip(PARTIAL))  # before the last
        return any(text in shown[max(0, known - len(text) + 1) :] for text in self.texts)

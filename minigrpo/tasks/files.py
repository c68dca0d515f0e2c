"""What all files of examples have in common: one pass over the file, two splits, an order of
examples that is derived.

The pass keeps no text, only where or what each example is; what is damaged is skipped, counted, and
said in one warning.
"""

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .chess_env import HELD_OUT_SHARE

NAMED = 3  # damaged games or lines that the warning names
LONGEST_REASON = 90


class Source(Protocol):
    """Where the examples of a task come from."""

    @property
    def num_held_out(self) -> int | None:
        """None: endless."""

    @property
    def heads(self) -> Sequence[str]:
        """How its prompts begin: "A: ", "P: "."""

    def train(self, number: int) -> Example: ...

    def held_out(self, number: int) -> Example: ...


class Listener(Protocol):
    """Who is told what happens while a file is read; `metrics.Screen` is one."""

    def warn(self, text: str) -> None: ...

    def reading(self, name: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """Shows how much of `total` is done, whenever the function is called with it."""


class Silent:
    def warn(self, text: str) -> None: ...

    def reading(self, name: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        return nullcontext(lambda done: None)


def fingerprint(text: str) -> int:
    """Eight bytes of a hash, as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Skipped:
    """Games or lines that were not taken, and why."""

    def __init__(self, path: Path, unit: str) -> None:
        self.path, self.unit = path, unit
        self.count = 0
        self.named: list[str] = []

    def add(self, number: int, why: object) -> None:
        self.count += 1
        if self.count <= NAMED:
            self.named.append(
                f"{self.unit} {number} ({' '.join(str(why).split())[:LONGEST_REASON]})"
            )

    def report(self, total: int, listener: Listener) -> None:
        if self.count:
            rest = ", ..." if self.count > NAMED else ""
            listener.warn(
                f"{self.path}: skipped {self.count} of {total} {self.unit}s: "
                f"{', '.join(self.named)}{rest}"
            )


def check_readable(path: Path) -> None:
    with readable(path):
        open(path, "rb").close()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what can go wrong with a file into a ValueError in one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None


class Shuffled(ABC):
    """Two splits of finitely many examples; each epoch of training shows each once, in an order of
    its own.

    What is asked often, as openings are, trains often, but is asked only once in an evaluation.
    """

    def __init__(
        self, path: Path, seed: int, train: np.ndarray, held_out: np.ndarray, questions: np.ndarray
    ) -> None:
        """Raises ValueError if a split is empty.

        Args:
            train, held_out: what `example` takes, one an example.
            questions: a number for each that is held out; of those with the same one, only the
                first is kept.
        """
        held_out = held_out[np.sort(np.unique(questions, return_index=True)[1])]
        if not len(train) or not len(held_out):
            raise ValueError(
                f"{path}: {len(train)} usable examples for training and {len(held_out)} for "
                "evaluation; there must be some "
                f"of each, and one position in {HELD_OUT_SHARE} is held out"
            )
        self.seed, self._train, self._held_out = seed, train, held_out
        self.num_train, self.num_held_out = len(train), len(held_out)
        self._order = lru_cache(maxsize=3)(self._shuffle)

    @abstractmethod
    def example(self, key: int, index: int) -> Example:
        """What stands at a key, as example number `index`."""

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, self.num_train)
        return self.example(int(self._train[self._order("train", epoch)[place]]), number)

    def held_out(self, number: int) -> Example:
        place = self._order("held-out", 0)[number % self.num_held_out]
        return self.example(int(self._held_out[place]), number)

    def _shuffle(self, split: str, epoch: int) -> np.ndarray:
        size = self.num_train if split == "train" else self.num_held_out
        return stream(self.seed, f"file/{split}", epoch).permutation(size)

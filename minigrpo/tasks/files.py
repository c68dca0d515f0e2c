"""What all example files share: opening, read errors, skipped records, splits, a seeded order.

A file is read once. That pass keeps the location or a compact form of each example, but not its
text. Invalid records are skipped, counted, and reported in one warning.
"""

import codecs
import re
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import numpy as np

from ..runtime.rng import stream
from ..types import Example
from .splits import POSITIONS_PER_HELD_OUT

MAX_NAMED = 3  # skipped records that the warning describes
MAX_REASON_CHARS = 90
COMPRESSED = {  # the first bytes of a compressed file -> what compressed it
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
}


class ExampleSource(Protocol):
    """Where the examples of a task come from: self-play, or a file."""

    @property
    def num_held_out(self) -> int | None:
        """How many evaluation examples there are; None if they are endless."""

    @property
    def prompt_prefixes(self) -> Sequence[str]:
        """How its prompts begin: "A: ", "P: "."""

    def train(self, number: int) -> Example: ...

    def held_out(self, number: int) -> Example: ...


class Listener(Protocol):
    """Receives warnings and progress while a file is read; `runtime.logging.Screen` is one."""

    def warn(self, text: str) -> None: ...

    def reading(self, name: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """Show progress: the function in the context is called with how much of `total` is done."""


class SilentListener:
    """Shows nothing."""

    def warn(self, text: str) -> None: ...

    def reading(self, name: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        return nullcontext(lambda done: None)


class SkippedRecords:
    """Counts the skipped games or lines of a file, and keeps the first reasons."""

    def __init__(self, path: Path, unit: str) -> None:
        """`unit`: what a record is called in the warning, "game" or "line"."""
        self.path, self.unit = path, unit
        self.count = 0
        self.named: list[str] = []

    def add(self, number: int, reason: object) -> None:
        """Count record `number`; the first record of a file is 1."""
        self.count += 1
        if self.count <= MAX_NAMED:
            short = " ".join(str(reason).split())[:MAX_REASON_CHARS]
            self.named.append(f"{self.unit} {number} ({short})")

    def report(self, total: int, listener: Listener) -> None:
        """Warn in one line, if any of the `total` records was skipped."""
        if self.count:
            rest = ", ..." if self.count > MAX_NAMED else ""
            listener.warn(
                f"{self.path}: skipped {self.count} of {total} {self.unit}s: "
                f"{', '.join(self.named)}{rest}"
            )


def check_readable(path: Path) -> None:
    """Raises ValueError, in one line, for a file that cannot be opened."""
    with readable(path):
        open_data(path).close()


def is_test(path: Path) -> bool:
    """Whether a file is named as a test: `test` is a word of its name."""
    return "test" in re.split(r"[^a-z]+", path.name.lower())


def test_files(paths: Sequence[Path]) -> list[Path]:
    """Those of several files that are named as tests (test.jsonl, gsm8k-test.jsonl).

    They are held out whole. None if there is nothing else to train on.
    """
    tests = [path for path in paths if is_test(path)]
    return tests if len(tests) < len(paths) else []


def check_is_text(path: Path, head: bytes) -> None:
    """Raise ValueError if a file that begins like this is compressed, or is not UTF-8."""
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            named = kind == "gzip" and path.suffix == ".pgn"
            hint = ", and must be named .pgn.gz" if named else "; unpack it first"
            raise ValueError(f"{path}: is compressed with {kind}{hint}")
    has_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark or b"\0\0" in (head[0:4:2], head[1:4:2]):  # or every other byte is 0
        raise ValueError(f"{path}: is UTF-16 text; convert it to UTF-8")


def open_data(path: Path) -> BufferedReader:
    """Open a data file. Raises OSError, also for a pipe: opening one may wait forever.

    Raises ValueError for a file that is not UTF-8 text, unless its name ends with .gz.
    """
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError("it is not a regular file")
    file = open(path, "rb")
    if path.suffix != ".gz":
        try:
            check_is_text(path, file.peek(4)[:4])
        except ValueError:
            file.close()
            raise
    return file


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into a ValueError in one line."""
    try:
        yield
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason})") from None


class ShuffledExamples(ABC):
    """The base class of file readers: finitely many examples in two splits.

    Each training epoch visits every example once, in a different order. A question that occurs
    several times in the file (an opening, say) is trained on as often, but evaluated only once.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        train: np.ndarray,
        held_out: np.ndarray,
        questions: np.ndarray,
        hint: str = "",
        share: str = f"one position in {POSITIONS_PER_HELD_OUT} is held out",
    ) -> None:
        """
        Args:
            train, held_out: `[n]` int, the keys that `example` takes, one per example.
            questions: `[n]` int, a hash of the question of each held-out example; among equal
                hashes only the first is kept.
            hint: added to the error for an empty split.
            share: what is held out, for that error.

        Raises:
            ValueError: a split is empty.
        """
        held_out = held_out[np.sort(np.unique(questions, return_index=True)[1])]
        if not len(train) or not len(held_out):
            raise ValueError(
                f"{path}: {len(train)} usable examples for training and {len(held_out)} for "
                f"evaluation; both need at least one, and {share}{hint}"
            )
        self.seed, self._train, self._held_out = seed, train, held_out
        self.num_train, self.num_held_out = len(train), len(held_out)
        self._order = lru_cache(maxsize=3)(self._shuffle)

    @abstractmethod
    def example(self, key: int, index: int) -> Example:
        """Return the example with this key, numbered `index`."""

    def train(self, number: int) -> Example:
        """Return training example `number`; epoch `number // num_train` decides the order."""
        epoch, place = divmod(number, self.num_train)
        return self.example(int(self._train[self._order("train", epoch)[place]]), number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`; beyond `num_held_out` they repeat."""
        place = self._order("held-out", 0)[number % self.num_held_out]
        return self.example(int(self._held_out[place]), number)

    def _shuffle(self, split: str, epoch: int) -> np.ndarray:
        size = self.num_train if split == "train" else self.num_held_out
        return stream(self.seed, f"file/{split}", epoch).permutation(size)

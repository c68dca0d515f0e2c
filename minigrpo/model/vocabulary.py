"""The vocabulary of a byte-level BPE, and its files in tiktoken's and in GPT-2's format.

tokenizer_json.py reads Hugging Face's format.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from ..runtime.text import parse_json

END_OF_TEXT = "<|endoftext|>"

NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not have

# How GPT-2 splits a text into pieces, within which bytes are merged: contractions; letters, digits
# or other characters, each with an optional space before them; white space.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@dataclass(frozen=True)
class Vocabulary:
    """How a text becomes tokens.

    Raises ValueError unless their numbers are 0 to size - 1. A model could sample a number without
    a token, and would learn from it although it is no part of the text.
    """

    pattern: str  # splits a text into pieces, within which bytes are merged
    ranks: Mapping[bytes, int]  # ordinary tokens; pairs are merged in the order of these numbers
    special: Mapping[str, int]  # control tokens: a text that spells one does not give it
    added: Mapping[str, int] = field(default_factory=dict)  # strings that are one token: <think>
    unreachable: Mapping[bytes, int] = field(default_factory=dict)  # no text gives these
    nfc: bool = False  # a text is first brought to Unicode's normal form C
    prefix: tuple[int, ...] = ()  # what a plain prompt starts with, such as <|begin_of_text|>

    def __post_init__(self) -> None:
        tables = (self.ranks, self.special, self.added, self.unreachable)
        numbers = {number for table in tables for number in table.values()}
        largest = max(numbers)
        if largest >= len(numbers):
            first = next(number for number in count() if number not in numbers)
            raise ValueError(
                f"{largest + 1 - len(numbers)} of the numbers up to {largest} have no token, the "
                f"first is {first}: a model can sample them, and they are no text; add a token "
                "for each"
            )

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.ranks) + len(self.special) + len(self.added) + len(self.unreachable)

    def bytes_by_number(self) -> dict[int, bytes]:
        """The text of each token."""
        tokens: dict[int, bytes] = {}
        for table in (self.unreachable, self.ranks):
            tokens |= {number: token for token, number in table.items()}
        for strings in (self.added, self.special):
            tokens |= {number: text.encode() for text, number in strings.items()}
        return tokens

    @property
    def missing(self) -> bytes:
        """The bytes of texts that have no token. They are dropped."""
        return bytes(b for b in range(256) if b not in NEVER and bytes([b]) not in self.ranks)


def ranked(ranks: Mapping[bytes, int], pattern: str = GPT2_PATTERN) -> Vocabulary:
    """The vocabulary of ranks 0, 1, 2, ..., followed by the end of text.

    Raises ValueError unless every byte has a token, so that any text round-trips, and no rank is
    missing.
    """
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"has no token for {len(missing)} of the 256 bytes, the first is {missing[0]}"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    return Vocabulary(pattern, ranks, special={END_OF_TEXT: len(ranks)})


def parse_ranks(lines: Iterable[bytes]) -> dict[bytes, int]:
    """Return token -> rank from the lines of a .tiktoken file: a token in base 64, and its rank.

    Raises:
        ValueError: names the first malformed line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:  # also the base class of base64's errors
            raise ValueError(
                f"line {number} is not a token in base 64 and its rank: {line[:40]!r}"
            ) from None
    return ranks


def parse_gpt2(merges: str, vocabulary: str) -> dict[bytes, int]:
    """Return token -> rank from GPT-2's two files.

    Args:
        merges: the text of merges.txt: one merge per line, in order.
        vocabulary: the text of vocab.json: an object that maps tokens to their numbers.

    Raises:
        ValueError: a file is malformed, or the two do not belong together. tiktoken has no separate
            list of merges: it merges in the order of the tokens' numbers, so these must agree.
    """
    try:
        numbers: dict[str, int] = parse_json(vocabulary)
    except ValueError as error:
        raise ValueError(f"the vocabulary is not whole JSON ({error})") from None
    if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
        raise ValueError("the vocabulary is not a JSON object of tokens and their numbers")
    end = numbers.pop(END_OF_TEXT, len(numbers))
    ranks = {bytes_of(text): number for text, number in numbers.items()}
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    merged = [bytes_of("".join(line.split(" "))) for line in lines]
    if sorted(ranks, key=ranks.__getitem__)[256:] != merged or end != len(ranks):
        raise ValueError(
            f"the vocabulary does not number 256 bytes, the {len(merged)} merges in their order, "
            f"{END_OF_TEXT}"
        )
    return ranks


# --- how files spell bytes ------------------------------------------------------------------------


def _letters() -> dict[int, str]:
    """Byte -> the character that stands for it in GPT-2's and Hugging Face's files.

    A byte is written as its own character if that is printable, else as U+0100, U+0101, ... in
    order.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


LETTERS = _letters()
# Characters below U+0100 that stand for no byte become one that latin-1 does not have.
_BYTES = dict.fromkeys(range(256), "\uffff") | {
    ord(letter): chr(byte) for byte, letter in LETTERS.items()
}


def bytes_of(text: str) -> bytes:
    """The bytes of a token as files spell it. Raises ValueError, naming the wrong character."""
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} does not stand for a byte") from None

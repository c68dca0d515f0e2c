"""Tokenizers, as `tiktoken.Encoding`: the shipped one for chess, GPT-2's, or one from a file.

The chess tokenizer has a token for each of the 256 bytes, so any text round-trips. It has longer
tokens only for fields with a fixed form: the squares of a move, side to move, castling rights, en
passant square, and the ending (reward and flags). Piece placement stays at one character per token,
because moves change single characters of it, and merged tokens would hide that.

`python -m minigrpo.model.tokenizer` regenerates the chess tokenizer's file of ranks.
"""

import base64
import itertools
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

import tiktoken

from ..runtime.text import parse_json

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "chess.tiktoken"
CHESS_PATTERN = (
    r"^A: "  # the prefix of a prompt
    r"| (?:[wb]|[a-h][36]|K?Q?k?q?|-)(?= )"  # side to move, castling rights, en passant square
    r"|(?<=\+)[a-h][1-8](?=[a-h][1-8])|(?<=\+[a-h][1-8])[a-h][1-8]"  # the two squares of a move
    r"|\+\d\.\d+\+\d\+\d$"  # the ending
    r"|(?s:.)"  # any other character
)


def chess_ranks() -> dict[bytes, int]:
    """Return token -> rank of the chess tokenizer; `load_tokenizer` reads them from the package."""
    squares = [file + rank for file in "abcdefgh" for rank in "12345678"]
    passant = [f" {square}" for square in squares if square[1] in "36"]
    castling = [
        "".join([" ", *rights]) for n in range(1, 5) for rights in itertools.combinations("KQkq", n)
    ]
    endings = ["+0.001+0+0", "+0.0+0+1", "+1.0+1+0", "+0.5+1+0"]
    texts = ["A: ", *squares, " w", " b", " -", *passant, *castling, *endings]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    return {token: rank for rank, token in enumerate(tokens)}


# how GPT-2 splits a text into pieces, within which bytes are merged: contractions; letters, digits
# or other characters, each with an optional space before them; white space
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# merges file -> vocabulary file in the same folder: OpenAI's names, then Hugging Face's
GPT2_FILES = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}


def _encoding(name: str, pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """An encoding from ranks. Raises ValueError unless every byte has a token, so that any text
    round-trips, and the ranks are 0, 1, 2, ...
    """
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"has no token for {len(missing)} of the 256 bytes, the first is {missing[0]}"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    return tiktoken.Encoding(
        name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )


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
    byte_of = _bytes_of_letters()

    def token(text: str) -> bytes:
        return bytes(byte_of[letter] for letter in text)

    try:
        numbers: dict[str, int] = parse_json(vocabulary)
    except ValueError as error:
        raise ValueError(f"the vocabulary is not whole JSON ({error})") from None
    if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
        raise ValueError("the vocabulary is not a JSON object of tokens and their numbers")
    end = numbers.pop(END_OF_TEXT, len(numbers))
    try:
        ranks = {token(text): number for text, number in numbers.items()}
        lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
        merged = [token("".join(line.split(" "))) for line in lines]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} does not stand for a byte") from None
    if sorted(ranks, key=ranks.__getitem__)[256:] != merged or end != len(ranks):
        raise ValueError(
            f"the vocabulary does not number 256 bytes, the {len(merged)} merges in their order, "
            f"{END_OF_TEXT}"
        )
    return ranks


def _bytes_of_letters() -> dict[str, int]:
    """Character in GPT-2's files -> byte. A byte is written as its own character if that is
    printable, else as U+0100, U+0101, ... in order.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _from_path(path: Path) -> tiktoken.Encoding:
    """The encoding with the ranks at a path and GPT-2's pattern. Raises ValueError, OSError."""
    if path.is_dir():
        if not (found := [path / merges for merges in GPT2_FILES if (path / merges).exists()]):
            names = " nor ".join(" and ".join(pair) for pair in GPT2_FILES.items())
            raise ValueError(f"there is neither {names} in this folder")
        path = found[0]
    merges_of = {vocabulary: merges for merges, vocabulary in GPT2_FILES.items()}
    merges = path.with_name(merges_of.get(path.name, path.name))
    if merges.name in GPT2_FILES:
        vocabulary = merges.with_name(GPT2_FILES[merges.name])
        texts = (file.read_text(encoding="utf-8-sig") for file in (merges, vocabulary))
        return _encoding(path.parent.name, GPT2_PATTERN, parse_gpt2(*texts))
    return _encoding(path.stem, GPT2_PATTERN, parse_ranks(path.read_bytes().splitlines()))


@cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding of --tokenizer; its `eot_token`, the last one, ends a completion.

    Args:
        name: chess, gpt2, or a path: a .tiktoken file of ranks, one of GPT-2's two files (see
            GPT2_FILES) with the other one in the same folder, or that folder.

    Raises:
        ValueError: in one line, for a path without a tokenizer, or if GPT-2's ranks are not cached
            and cannot be fetched.
    """
    if name == "chess":
        lines = files("minigrpo.assets").joinpath(RANKS_FILE).read_bytes().splitlines()
        return _encoding(name, CHESS_PATTERN, parse_ranks(lines))
    if name != "gpt2":
        try:
            return _from_path(Path(name))
        except FileNotFoundError as error:
            raise ValueError(
                f"--tokenizer {name}: must be chess, gpt2 or a path; there is no {error.filename}"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--tokenizer {name}: {error}") from None
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # tiktoken raises network and file system errors of many types
        fetch = f"python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")'"
        raise ValueError(
            f"--tokenizer {name}: tiktoken cannot fetch its ranks ({type(error).__name__}); give "
            "them as a path (a file of ranks, or a folder with vocab.bpe and encoder.json or "
            "merges.txt and vocab.json), or run "
            f"`TIKTOKEN_CACHE_DIR=DIR {fetch}` on a machine with network, copy DIR here and set "
            "TIKTOKEN_CACHE_DIR to it"
        ) from error


if __name__ == "__main__":
    with open(str(files("minigrpo.assets").joinpath(RANKS_FILE)), "wb") as file:
        file.writelines(
            base64.b64encode(token) + f" {rank}\n".encode() for token, rank in chess_ranks().items()
        )

"""Text to tokens: a `tiktoken.Encoding`: the one for chess that ships with the package, GPT-2's, or
ranks from a file.

The shipped one has all 256 bytes, so any text round-trips, and whole tokens only where a text has a
fixed form: squares of a move, side to move, castling rights, en passant square and the ending.
Piece placement stays one character a token, because a move rewrites it character by character;
merges there would have to be taken apart again.
"""

import base64
import itertools
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "chess.tiktoken"
# alternatives: head of a prompt; side, castling rights, en passant; the two squares of a move; the
# ending; any character
CHESS_PATTERN = (
    r"^A: | (?:[wb]|[a-h][36]|K?Q?k?q?|-)(?= )|(?<=\+)[a-h][1-8](?=[a-h][1-8])|(?<=\+[a-h][1-8])[a-h][1-8]"
    r"|\+\d\.\d+\+\d\+\d$|(?s:.)"
)


def chess_ranks() -> dict[bytes, int]:
    """The ranks of the shipped tokenizer, as `python -m minigrpo.model.tokenizer` writes them."""
    squares = [file + rank for file in "abcdefgh" for rank in "12345678"]
    castling = [
        "".join(rights) for n in range(1, 5) for rights in itertools.combinations("KQkq", n)
    ]
    texts = [
        "A: ",
        *squares,
        " w",
        " b",
        " -",
        *(f" {square}" for square in squares if square[1] in "36"),
    ]
    texts += [f" {rights}" for rights in castling] + [
        "+0.001+0+0",
        "+0.0+0+1",
        "+1.0+1+0",
        "+0.5+1+0",
    ]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    return {token: rank for rank, token in enumerate(tokens)}


# how GPT-2 cuts a text before it merges: contractions; letters, digits or signs, with a space
# before them; white space
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# merges and vocabulary as they were published first, and as Hugging Face calls them
GPT2_FILES = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}


def _encoding(name: str, pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """Raises ValueError unless there is a token for each byte and the ranks are 0, 1, 2, ...: then
    any text round-trips.
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
    """Ranks as tiktoken stores them: a token in base 64 and its rank a line. Raises ValueError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:  # binascii's errors are among them
            raise ValueError(
                f"line {number} is not a token in base 64 and its rank: {line[:40]!r}"
            ) from None
    return ranks


def parse_gpt2(merges: str, vocabulary: str) -> dict[bytes, int]:
    """Ranks from GPT-2's two files: the merges in their order, and a JSON object of tokens and
    their numbers.

    Raises ValueError if they do not belong together: tiktoken takes a token's number for the place
    of its merge.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [
        byte for byte in range(256) if byte not in printable
    ]  # these files write them as U+0100, U+0101, ...
    byte_of = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }

    def token(text: str) -> bytes:
        return bytes(byte_of[letter] for letter in text)

    try:
        numbers: dict[str, int] = json.loads(vocabulary)
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


def _from_path(path: Path) -> tiktoken.Encoding:
    """Ranks with GPT-2's pattern. Raises ValueError, OSError."""
    if path.is_dir():
        if not (found := [path / merges for merges in GPT2_FILES if (path / merges).exists()]):
            names = " nor ".join(" and ".join(pair) for pair in GPT2_FILES.items())
            raise ValueError(f"there is neither {names} in this folder")
        path = found[0]
    merges_of = {vocabulary: merges for merges, vocabulary in GPT2_FILES.items()}
    merges = path.with_name(merges_of.get(path.name, path.name))
    if merges.name in GPT2_FILES:
        files = (merges, merges.with_name(GPT2_FILES[merges.name]))
        return _encoding(
            path.parent.name,
            GPT2_PATTERN,
            parse_gpt2(*(file.read_text(encoding="utf-8") for file in files)),
        )
    return _encoding(path.stem, GPT2_PATTERN, parse_ranks(path.read_bytes().splitlines()))


@cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`: chess, gpt2, or a path; `eot_token`, the last one, is its end of
    text.

    A path is a .tiktoken file of ranks, one of GPT-2's two files (see GPT2_FILES) beside the other,
    or their folder.

    Raises ValueError in one line where a file is missing or no tokenizer, or GPT-2's ranks neither
    cached nor to be fetched.
    """
    if name == "chess":
        return _encoding(
            name,
            CHESS_PATTERN,
            parse_ranks(files("minigrpo.assets").joinpath(RANKS_FILE).read_bytes().splitlines()),
        )
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
    except (
        Exception
    ) as error:  # requests' and the file system's errors: tiktoken lets all of them through
        raise ValueError(
            f"--tokenizer {name}: tiktoken cannot fetch its ranks ({type(error).__name__}); give "
            "them by path (a file of "
            "ranks, or a folder with vocab.bpe and encoder.json or merges.txt and vocab.json); or "
            "on another machine run "
            f"`TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")'`, bring DIR here and "
            "set TIKTOKEN_CACHE_DIR to it"
        ) from error


if __name__ == "__main__":
    with open(str(files("minigrpo.assets").joinpath(RANKS_FILE)), "wb") as file:
        file.writelines(
            base64.b64encode(token) + f" {rank}\n".encode() for token, rank in chess_ranks().items()
        )

"""Text to tokens: a `tiktoken.Encoding`, either the one for chess that ships with the package, or GPT-2's.

The shipped one has all 256 bytes, so any text round-trips, and whole tokens only where a text has a fixed form: squares of a
move, side to move, castling rights, en passant square and the ending. Piece placement stays one character a token, because a
move rewrites it character by character; merges there would have to be taken apart again.
"""

import base64
import itertools
from functools import cache
from importlib.resources import files

import tiktoken

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "chess.tiktoken"
# alternatives: head of a prompt; side, castling rights, en passant; the two squares of a move; the ending; any character
CHESS_PATTERN = (
    r"^A: | (?:[wb]|[a-h][36]|K?Q?k?q?|-)(?= )|(?<=\+)[a-h][1-8](?=[a-h][1-8])|(?<=\+[a-h][1-8])[a-h][1-8]"
    r"|\+\d\.\d+\+\d\+\d$|(?s:.)"
)


def chess_ranks() -> dict[bytes, int]:
    """The ranks of the shipped tokenizer, as `python -m minigrpo.tokenizer` writes them."""
    squares = [file + rank for file in "abcdefgh" for rank in "12345678"]
    castling = ["".join(rights) for n in range(1, 5) for rights in itertools.combinations("KQkq", n)]
    texts = ["A: ", *squares, " w", " b", " -", *(f" {square}" for square in squares if square[1] in "36")]
    texts += [f" {rights}" for rights in castling] + ["+0.001+0+0", "+0.0+0+1", "+1.0+1+0", "+0.5+1+0"]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    return {token: rank for rank, token in enumerate(tokens)}


def _shipped() -> tiktoken.Encoding:
    lines = files("minigrpo.assets").joinpath(RANKS_FILE).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding(
        name="chess", pat_str=CHESS_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )


@cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`, chess or gpt2; `eot_token` is its end of text.

    Raises ValueError in one line where GPT-2's ranks are neither cached nor to be fetched.
    """
    if name == "chess":
        return _shipped()
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # requests' and the file system's errors: tiktoken lets all of them through
        raise ValueError(
            f"--tokenizer {name}: tiktoken cannot fetch its ranks ({type(error).__name__}); on a machine with a network run "
            f"`TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")'`, bring DIR here and "
            "set TIKTOKEN_CACHE_DIR to it"
        ) from error


if __name__ == "__main__":
    with open(str(files("minigrpo.assets").joinpath(RANKS_FILE)), "wb") as file:
        file.writelines(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in chess_ranks().items())

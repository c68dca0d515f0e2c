"""The shipped vocabulary for chess.

It has a token for each of the 256 bytes, so any text round-trips. It has longer tokens only for
fields with a fixed form: the squares of a move, side to move, castling rights, en passant square,
and the ending (reward and flags). Piece placement stays at one character per token, because moves
change single characters of it, and merged tokens would hide that.

`python -m minigrpo.model.chess_tokens` regenerates its file of ranks.
"""

import base64
import itertools
from importlib.resources import files

from .vocabulary import parse_ranks

RANKS_FILE = "chess.tiktoken"
CHESS_PATTERN = (
    r"^A: "  # the prefix of a prompt
    r"| (?:[wb]|[a-h][36]|K?Q?k?q?|-)(?= )"  # side to move, castling rights, en passant square
    r"|(?<=\+)[a-h][1-8](?=[a-h][1-8])|(?<=\+[a-h][1-8])[a-h][1-8]"  # the two squares of a move
    r"|\+\d\.\d+\+\d\+\d$"  # the ending
    r"|(?s:.)"  # any other character
)


def shipped_ranks() -> dict[bytes, int]:
    """Return token -> rank from the file in the package."""
    return parse_ranks(files("minigrpo.assets").joinpath(RANKS_FILE).read_bytes().splitlines())


def chess_ranks() -> dict[bytes, int]:
    """Return token -> rank: what the file in the package holds."""
    squares = [file + rank for file in "abcdefgh" for rank in "12345678"]
    passant = [f" {square}" for square in squares if square[1] in "36"]
    castling = [
        "".join([" ", *rights]) for n in range(1, 5) for rights in itertools.combinations("KQkq", n)
    ]
    endings = ["+0.001+0+0", "+0.0+0+1", "+1.0+1+0", "+0.5+1+0"]
    texts = ["A: ", *squares, " w", " b", " -", *passant, *castling, *endings]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    return {token: rank for rank, token in enumerate(tokens)}


if __name__ == "__main__":
    with open(str(files("minigrpo.assets").joinpath(RANKS_FILE)), "wb") as file:
        file.writelines(
            base64.b64encode(token) + f" {rank}\n".encode() for token, rank in chess_ranks().items()
        )

"""ModelSelection texts are positions: FEN validity, for rewards that are asked it a thousand times a step.

python-chess judges the pieces but does not read the text: a form that is wrong is turned away by a
pattern, ranks are remembered, and the board that python-chess looks at is set up from bits.
"""

import re
import struct
import threading
from functools import lru_cache

import chess

MAX_FEN_LENGTH = 100  # python-chess parses a megabyte in 0.2 s; no FEN is longer than this
FEN = re.compile(
    r"([PNBRQKpnbrqk1-8]+(?:/[PNBRQKpnbrqk1-8]+){7}) ([wb]) (-|(?! )K?Q?k?q?) (-|[a-h][36])"
    r" (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
# a piece as a bit in two of eight boards of 64 bits: pawns, knights, bishops, rooks, queens, kings,
# Black and White
BOARDS = struct.Struct("<8Q")
PIECES = {
    piece: 1 << 64 * "pnbrqk".index(piece.lower()) | 1 << 64 * (6 + piece.isupper())
    for piece in "PNBRQKpnbrqk"
}
GAPS = {digit: int(digit) for digit in "12345678"}
# a right, where its king and its rook must stand, and whose they are
CASTLING = {
    "K": (chess.E1, chess.H1, chess.WHITE),
    "Q": (chess.E1, chess.A1, chess.WHITE),
    "k": (chess.E8, chess.H8, chess.BLACK),
    "q": (chess.E8, chess.A8, chess.BLACK),
}


@lru_cache(maxsize=1 << 16)
def _rank(text: str) -> int | None:
    """The eight boards of one rank, the first; see PIECES. None if it is not one."""
    boards, file, gap = 0, 0, False
    for piece in text:
        if bits := PIECES.get(piece):
            boards |= bits << file
            file, gap = file + 1, False
        elif gap:
            return None  # 11 is written 2
        else:
            file, gap = file + GAPS[piece], True
    return boards if file == 8 else None


class _Local(threading.local):
    """A board of each thread, to be set up again and again: making one takes longer than all that
    is done to it here.
    """

    def __init__(self) -> None:
        self.board = chess.Board(None)


_local = _Local()


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position, written exactly as python-chess writes it with
    `en_passant="fen"`.

    Stricter than `chess.Board(text).is_valid()`, which fills in missing fields, reads clocks
    through `int()` and drops a castling right whose rook is gone: the text must also round-trip,
    and clocks have at most four digits. What is malformed is turned away by its form, what is not
    is never parsed twice: python-chess judges the pieces, it does not read the text.
    """
    if (
        not isinstance(text, str)
        or len(text) > MAX_FEN_LENGTH
        or (match := FEN.fullmatch(text)) is None
    ):
        return False
    placement, side, castling, passant = match.groups()
    boards = 0
    for row in placement.split("/"):
        if (rank := _rank(row)) is None:
            return False
        boards = (
            boards << 8 | rank
        )  # the eighth rank comes first, and goes up with each that follows
    board, own = _local.board, _local.board.occupied_co
    board.castling_rights, board.ep_square = chess.BB_EMPTY, None
    (
        board.pawns,
        board.knights,
        board.bishops,
        board.rooks,
        board.queens,
        board.kings,
        black,
        white,
    ) = BOARDS.unpack(boards.to_bytes(BOARDS.size, "little"))
    own[chess.BLACK], own[chess.WHITE], board.occupied = black, white, black | white
    board.turn = side == "w"
    if castling != "-":
        for right in castling:
            king, rook, color = CASTLING[right]
            if not (
                board.kings & own[color] & chess.BB_SQUARES[king]
                and board.rooks & own[color] & chess.BB_SQUARES[rook]
            ):
                return False
            board.castling_rights |= chess.BB_SQUARES[rook]
    if passant != "-":
        board.ep_square = chess.parse_square(passant)
    return board.status() == chess.STATUS_VALID

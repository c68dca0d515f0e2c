"""Which texts are positions: FEN validity, for rewards that are asked it a thousand times a step.

python-chess judges the pieces but does not read the text: a form that is wrong is turned away by a pattern, ranks are
remembered, and the board that python-chess looks at is set up from bits.
"""

import re
import threading
from functools import lru_cache

import chess

MAX_FEN_LENGTH = 100  # python-chess parses a megabyte in 0.2 s; no FEN is longer than this
FEN = re.compile(
    r"([PNBRQKpnbrqk1-8]+(?:/[PNBRQKpnbrqk1-8]+){7}) ([wb]) (-|(?! )K?Q?k?q?) (-|[a-h][36])"
    r" (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
# where a piece stands in eight bytes, one for each of pawns, knights, bishops, rooks, queens, kings, Black and White
PIECES = {piece: 1 << 8 * "pnbrqk".index(piece.lower()) | 1 << 8 * (6 + piece.isupper()) for piece in "PNBRQKpnbrqk"}
GAPS = {digit: int(digit) for digit in "12345678"}
# a right, where its king and its rook must stand, and whose they are
CASTLING = {
    "K": (chess.E1, chess.H1, chess.WHITE),
    "Q": (chess.E1, chess.A1, chess.WHITE),
    "k": (chess.E8, chess.H8, chess.BLACK),
    "q": (chess.E8, chess.A8, chess.BLACK),
}


@lru_cache(maxsize=1 << 16)
def _rank(text: str) -> bytes:
    """One rank as eight bytes, see PIECES, a bit a file; empty if it is none."""
    boards, file, gap = 0, 0, False
    for piece in text:
        if bits := PIECES.get(piece):
            boards |= bits << file
            file, gap = file + 1, False
        elif gap:
            return b""  # 11 is written 2
        else:
            file, gap = file + GAPS[piece], True
    return boards.to_bytes(8, "little") if file == 8 else b""


class _Local(threading.local):
    """A board of each thread, to be set up again and again: making one takes longer than all that is done to it here."""

    def __init__(self) -> None:
        self.board = chess.Board(None)


_local = _Local()


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position, written exactly as python-chess writes it with `en_passant="fen"`.

    Stricter than `chess.Board(text).is_valid()`, which fills in missing fields, reads clocks through `int()` and drops a
    castling right whose rook is gone: the text must also round-trip, and clocks have at most four digits. What is malformed
    is turned away by its form, what is not is never parsed twice: python-chess judges the pieces, it does not read the text.
    """
    if not isinstance(text, str) or len(text) > MAX_FEN_LENGTH or (match := FEN.fullmatch(text)) is None:
        return False
    placement, side, castling, passant = match.groups()
    data = b""  # the eighth rank comes first
    for rank in placement.split("/"):
        if not (found := _rank(rank)):
            return False
        data += found
    board, number = _local.board, int.from_bytes
    board.castling_rights, board.ep_square = chess.BB_EMPTY, None
    board.pawns, board.knights, board.bishops = number(data[0::8]), number(data[1::8]), number(data[2::8])
    board.rooks, board.queens, board.kings = number(data[3::8]), number(data[4::8]), number(data[5::8])
    board.occupied_co[chess.BLACK], board.occupied_co[chess.WHITE] = number(data[6::8]), number(data[7::8])
    board.occupied = board.occupied_co[chess.BLACK] | board.occupied_co[chess.WHITE]
    board.turn = side == "w"
    if castling != "-":
        for right in castling:
            king, rook, color = CASTLING[right]
            own = board.occupied_co[color]
            if not (board.kings & own & chess.BB_SQUARES[king] and board.rooks & own & chess.BB_SQUARES[rook]):
                return False
            board.castling_rights |= chess.BB_SQUARES[rook]
    if passant != "-":
        board.ep_square = chess.parse_square(passant)
    return board.status() == chess.STATUS_VALID

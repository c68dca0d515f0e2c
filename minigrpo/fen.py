"""Chess positions as text (FEN): which are valid, and what a move makes of them.

En passant follows `fen(en_passant="fen")`: the square behind every double step is written, whether
or not a pawn can capture there.

`is_valid_fen` is called thousands of times per step, so python-chess checks the position but does
not parse the text: a regular expression rejects malformed texts, the parse of each rank is cached,
and the board is built directly from bit masks.
"""

import re
import struct
from functools import lru_cache

import chess

FEN = re.compile(
    r"([PNBRQKpnbrqk1-8]{1,8}(?:/[PNBRQKpnbrqk1-8]{1,8}){7}) ([wb]) (-|(?! )K?Q?k?q?)"
    r" (-|[a-h][36]) (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
# A position as eight 64-bit boards: pawns, knights, bishops, rooks, queens, kings, Black, White.
# A piece on the first square (a1) is the lowest bit in two of them, its type's and its colour's.
BOARDS = struct.Struct("<8Q")
# castling right -> the square of its rook
CASTLING = {"K": chess.BB_H1, "Q": chess.BB_A1, "k": chess.BB_H8, "q": chess.BB_A8, "-": 0}


@lru_cache(maxsize=1 << 16)
def _rank(text: str) -> int | None:
    """The eight boards (see BOARDS) with these pieces on the first rank; None if malformed."""
    try:
        board = chess.BaseBoard(f"8/8/8/8/8/8/8/{text}")
    except ValueError:  # not eight squares, or 11 in place of 2
        return None
    officers = board.knights, board.bishops, board.rooks, board.queens, board.kings
    return int.from_bytes(BOARDS.pack(board.pawns, *officers, *board.occupied_co), "little")


def is_valid_fen(text: object) -> bool:
    """Return whether `text` is a legal position, exactly as python-chess writes it with
    `en_passant="fen"`. Never raises.

    This is stricter than `chess.Board(text).is_valid()`, which fills in missing fields, reads the
    clocks with `int()`, and drops a castling right whose rook is missing. Here the text must also
    be what python-chess would write back, and each clock has at most four digits.
    """
    if not isinstance(text, str) or (match := FEN.fullmatch(text)) is None:
        return False
    placement, side, castling, passant = match.groups()
    boards = 0
    for row in placement.split("/"):
        if (rank := _rank(row)) is None:
            return False
        boards = boards << 8 | rank  # a FEN begins with rank 8, so each row shifts earlier rows up
    board = chess.Board(None)
    *pieces, black, white = BOARDS.unpack(boards.to_bytes(BOARDS.size, "little"))
    board.pawns, board.knights, board.bishops, board.rooks, board.queens, board.kings = pieces
    board.occupied_co, board.occupied = [black, white], black | white
    board.turn = side == "w"
    board.castling_rights = sum(CASTLING[right] for right in castling)
    board.ep_square = None if passant == "-" else chess.parse_square(passant)
    return board.status() == chess.STATUS_VALID


def render(board: chess.Board) -> str:
    """The FEN of a board."""
    return board.fen(en_passant="fen")


def position_key(fen: str) -> str:
    """A FEN without its clocks: a position that recurs later counts as the same."""
    return fen.rsplit(" ", 2)[0]


def transition(fen: str, uci: str) -> tuple[str, str]:
    """What a move makes of a position, `<FEN>+<reward>+<terminated>+<truncated>`, and its kind.

    An illegal move leaves the position as it is. The result depends on the text alone.
    """
    board = chess.Board(fen)
    try:
        move = board.parse_uci(uci)
    except ValueError:
        return f"{fen}+0.0+0+1", "illegal"
    kind, ending = push(board, move)
    return f"{render(board)}+{ending}", kind


def push(board: chess.Board, move: chess.Move) -> tuple[str, str]:
    """Play a legal move; return its kind, and `<reward>+<terminated>+<truncated>`."""
    kind = move_kind(board, move)
    board.push(move)
    board.clear_stack()  # a FEN cannot show repetition, so it must not count
    if outcome := board.outcome():
        return ("draw", "0.5+1+0") if outcome.winner is None else ("checkmate", "1.0+1+0")
    return "check" if board.is_check() else kind, "0.001+0+0"


def move_kind(board: chess.Board, move: chess.Move) -> str:
    """The kind of a legal move before it is played."""
    if board.is_castling(move):
        return "castling"
    if move.promotion:
        return "promotion"
    if board.is_en_passant(move):
        return "en passant"
    return "capture" if board.is_capture(move) else "quiet"

"""Chess positions as text (FEN): which are valid, and what a move makes of them.

En passant follows `fen(en_passant="fen")`: the square behind every double step is written, whether
or not a pawn can capture there.
"""

import re
from functools import lru_cache
from struct import pack, unpack
from threading import get_ident

import chess

FEN = re.compile(
    r"([PNBRQKpnbrqk1-8]{1,8}(?:/[PNBRQKpnbrqk1-8]{1,8}){7}) ([wb]) (-|(?! )K?Q?k?q?)"
    r" (-|[a-h][36]) (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
# castling right -> the square of its rook
CASTLING = {"K": chess.BB_H1, "Q": chess.BB_A1, "k": chess.BB_H8, "q": chess.BB_A8, "-": 0}


@lru_cache(maxsize=1 << 16)
def pieces_of(rank: str) -> int | None:
    """Eight bitboards of the lowest rank, side by side: six kinds of pieces, Black's, White's.

    None if the rank has not eight squares, or writes 2 as 11.
    """
    try:
        x = chess.BaseBoard(f"8/8/8/8/8/8/8/{rank}")
    except ValueError:
        return None
    kinds = pack(">8Q", x.pawns, x.knights, x.bishops, x.rooks, x.queens, x.kings, *x.occupied_co)
    return int.from_bytes(kinds)


@lru_cache
def scratch(thread: int) -> chess.Board:
    """The board of one thread that `is_valid_fen` fills; making one takes as long as judging it."""
    return chess.Board(None)


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position as `board.fen(en_passant="fen")` writes it. Never raises.

    This is stricter than `chess.Board(text).is_valid()`, which fills in missing fields, reads the
    clocks with `int()`, and drops a castling right whose rook is missing. Here the text must also
    be what python-chess would write back, and each clock has at most four digits.

    It is called thousands of times per step. So the ranks, of which there are few, are parsed once.
    """
    if not isinstance(text, str) or (match := FEN.fullmatch(text)) is None:
        return False
    placement, side, castling, passant = match.groups()
    pieces = 0
    for rank in placement.split("/"):  # from rank 8, the highest byte of a bitboard
        if (lowest := pieces_of(rank)) is None:
            return False
        pieces = pieces << 8 | lowest
    x = scratch(get_ident())
    kinds = unpack(">8Q", pieces.to_bytes(64))
    x.pawns, x.knights, x.bishops, x.rooks, x.queens, x.kings, *x.occupied_co = kinds
    x.occupied = sum(x.occupied_co)
    x.turn, x.castling_rights = side == "w", sum(map(CASTLING.__getitem__, castling))
    x.ep_square = None if passant == "-" else chess.parse_square(passant)
    return x.is_valid()


def render(board: chess.Board) -> str:
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

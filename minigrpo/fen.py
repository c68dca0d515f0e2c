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
    r"(?P<placement>[PNBRQKpnbrqk1-8]{1,8}(?:/[PNBRQKpnbrqk1-8]{1,8}){7}) (?P<side>[wb])"
    r" (?P<castling>-|(?! )K?Q?k?q?) (?P<passant>-|[a-h][36])"
    r" (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
# castling right -> the square of its rook
CASTLING = {"K": chess.BB_H1, "Q": chess.BB_A1, "k": chess.BB_H8, "q": chess.BB_A8, "-": 0}


@lru_cache(maxsize=1 << 16)
def pieces_of(rank: str) -> int | None:
    """Eight bitboards of the lowest rank, side by side: six kinds of pieces, Black's, White's.

    None if the rank has not eight squares, or writes 2 as 11.
    """
    try:
        board = chess.BaseBoard(f"8/8/8/8/8/8/8/{rank}")
    except ValueError:
        return None
    kinds = (board.pawns, board.knights, board.bishops, board.rooks, board.queens, board.kings)
    return int.from_bytes(pack(">8Q", *kinds, *board.occupied_co))


@lru_cache
def scratch(thread: int) -> chess.Board:
    """The board of one thread that `is_valid_fen` fills; making one takes as long as judging it."""
    return chess.Board(None)


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position as `board.fen(en_passant="fen")` writes it. Never raises.

    `chess.Board(text).is_valid()` fills in missing fields, reads the clocks with `int()`, and drops
    a castling right whose rook is missing. Here the text must also be what python-chess would write
    back, with clocks of at most four digits. It is called thousands of times per step, so the
    ranks, of which there are few, are parsed once.
    """
    fields = FEN.fullmatch(text) if isinstance(text, str) else None
    if fields is None:
        return False
    pieces = 0
    for rank in fields["placement"].split("/"):  # from rank 8, the highest byte of a bitboard
        lowest = pieces_of(rank)
        if lowest is None:
            return False
        pieces = pieces << 8 | lowest
    board = scratch(get_ident())
    *kinds, black, white = unpack(">8Q", pieces.to_bytes(64))
    board.pawns, board.knights, board.bishops, board.rooks, board.queens, board.kings = kinds
    board.occupied_co = [black, white]
    board.occupied = black | white
    board.turn = fields["side"] == "w"
    board.castling_rights = sum(map(CASTLING.__getitem__, fields["castling"]))
    passant = fields["passant"]
    board.ep_square = None if passant == "-" else chess.parse_square(passant)
    return board.is_valid()


def render(board: chess.Board) -> str:
    return board.fen(en_passant="fen")


def position_key(fen: str) -> str:
    """A FEN without its clocks: a position that recurs later counts as the same."""
    return fen.rsplit(" ", 2)[0]


def transition(fen: str, uci: str) -> tuple[str, str]:
    """What a move makes of a position, `<FEN>+<reward>+<terminated>+<truncated>`, and its kind."""
    board = chess.Board(fen)
    try:
        move = board.parse_uci(uci)
    except ValueError:
        return f"{fen}+0.0+0+1", "illegal"  # which leaves the position as it is
    kind, ending = push(board, move)
    return f"{render(board)}+{ending}", kind


def push(board: chess.Board, move: chess.Move) -> tuple[str, str]:
    """Play a legal move; return its kind, and `<reward>+<terminated>+<truncated>`."""
    kind = move_kind(board, move)
    board.push(move)
    board.clear_stack()  # a FEN cannot show repetition, so it must not count
    outcome = board.outcome()
    if outcome is None:
        return "check" if board.is_check() else kind, "0.001+0+0"
    return ("draw", "0.5+1+0") if outcome.winner is None else ("checkmate", "1.0+1+0")


def move_kind(board: chess.Board, move: chess.Move) -> str:
    """The kind of a legal move before it is played."""
    if board.is_castling(move):
        return "castling"
    if move.promotion:
        return "promotion"
    if board.is_en_passant(move):
        return "en passant"
    return "capture" if board.is_capture(move) else "quiet"

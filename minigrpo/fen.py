"""Chess positions as text (FEN): which ones are valid, and what follows from a move.

En passant follows `fen(en_passant="fen")`: the square behind every double step is written, whether
or not a pawn can capture there.
"""

import re

import chess

FEN = re.compile(
    r"[PNBRQKpnbrqk1-8]{1,8}(?:/[PNBRQKpnbrqk1-8]{1,8}){7} [wb] (?P<castling>-|(?! )K?Q?k?q?)"
    r" (?:-|[a-h][36]) (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position as `write_fen` writes it, with clocks of 1 to 4 digits.

    `chess.Board(text).is_valid()` alone fills in missing fields, reads the clocks with `int()`, and
    drops a castling right whose rook is missing.
    """
    fields = FEN.fullmatch(text) if isinstance(text, str) else None
    if fields is None:
        return False
    try:
        board = chess.Board(fields[0])
    except ValueError:  # a rank does not have eight squares, or writes 2 as 11
        return False
    return board.is_valid() and board.castling_xfen() == fields["castling"]


def write_fen(board: chess.Board) -> str:
    return board.fen(en_passant="fen")


def position_key(fen: str) -> str:
    """A FEN without its clocks, so that a position that recurs later is the same."""
    return fen.rsplit(" ", 2)[0]


def transition(fen: str, uci: str) -> tuple[str, str]:
    """The result of a move, `<FEN>+<reward>+<terminated>+<truncated>`, and its kind."""
    board = chess.Board(fen)
    try:
        move = board.parse_uci(uci)
    except ValueError:
        return f"{fen}+0.0+0+1", "illegal"  # the position stays as it is
    kind, ending = push(board, move)
    return f"{write_fen(board)}+{ending}", kind


def push(board: chess.Board, move: chess.Move) -> tuple[str, str]:
    """Play a legal move; return its kind and `<reward>+<terminated>+<truncated>`."""
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

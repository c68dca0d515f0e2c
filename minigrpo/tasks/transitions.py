"""The result of a chess move as text: the true answers of the chess-env task, from python-chess.

En passant follows `fen(en_passant="fen")`: the square behind every double step is written, whether
or not a pawn can capture there.
"""

import chess

PROMPT_PREFIX = "A: "  # of questions about the position after a move


def render(board: chess.Board) -> str:
    """Return the FEN of a board, in the en passant convention of this task."""
    return board.fen(en_passant="fen")


def ending_of(board: chess.Board) -> str:
    """Return `<reward>+<terminated>+<truncated>` for the position after a legal move.

    Clears the board's move stack first: a FEN cannot show repetition, so it must not count.
    """
    board.clear_stack()
    outcome = board.outcome()
    if outcome is None:
        return "0.001+0+0"
    return f"{'0.5' if outcome.winner is None else '1.0'}+1+0"


def transition(fen: str, uci: str) -> str:
    """Return the true completion for a position and a move, `<FEN>+` and what `ending_of` returns.

    An illegal move leaves the position as it is. The result depends on the text alone.

    Raises:
        ValueError: `fen` is not a FEN, or `uci` is not a move in UCI notation.
    """
    board = chess.Board(fen)
    move = chess.Move.from_uci(uci)
    if not board.is_legal(move):
        return f"{fen}+0.0+0+1"
    board.push(move)
    return f"{render(board)}+{ending_of(board)}"


def prompt_of(fen: str, uci: str, before: str | None = None) -> str:
    """Return the prompt for a position and a move.

    Args:
        before: with --history, the moves before this one, separated by commas; None without it.
    """
    history = "" if before is None else f"{before}+"
    return f"{PROMPT_PREFIX}{fen}+{uci}+{history}"


def move_kind(board: chess.Board, move: chess.Move) -> str:
    """Return the kind of a legal move, judged before it is played."""
    if board.is_castling(move):
        return "castling"
    if move.promotion:
        return "promotion"
    if board.is_en_passant(move):
        return "en passant"
    return "capture" if board.is_capture(move) else "quiet"


def ply_kind(board: chess.Board, kind: str) -> str:
    """Return the kind of an example: check, checkmate or draw, else the kind of its move.

    Args:
        board: the position after the move.
        kind: the result of `move_kind` for the move.
    """
    if board.is_check():
        return "check" if any(board.legal_moves) else "checkmate"
    if (
        board.is_insufficient_material()
        or not any(board.legal_moves)
        or board.is_seventyfive_moves()
    ):
        return "draw"
    return kind

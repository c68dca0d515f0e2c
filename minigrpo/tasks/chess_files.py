"""Chess questions from files of games, .pgn or .pgn.gz.

Each ply of the main line of a game is a question. A game that breaks the rules is skipped.
"""

import gzip
from collections.abc import Callable
from functools import partial
from typing import TextIO

import chess
import chess.pgn

from ..fen import is_valid_fen, position_key, render
from ..runtime.rng import stream
from .data import Files, Row, Rows
from .self_play import position_is_held_out, question_about

chess.pgn.LOGGER.disabled = True  # bad games are counted, not printed


class ChessFiles(Rows):
    """The questions of files. Rows with one position ask the same, whatever the move."""

    def __init__(self, seed: int, data: Files, eval_data: Files) -> None:
        self.speculate = True
        self.skipped: list[str] = []  # "FILE, game 3: why"
        super().__init__(seed, data, eval_data)
        if self.skipped:
            self.about += f"; skipped {len(self.skipped)}, such as {self.skipped[0]}"

    def read(self, files: Files, argument: str = "data") -> list[Row]:
        """The rows in a random order, because the positions of one game are alike."""
        rows = []
        for path in map(str, files):
            open_text: Callable[..., TextIO] = gzip.open if path.endswith(".gz") else open
            with open_text(path, "rt", encoding="utf-8-sig", errors="replace") as file:
                games = iter(partial(chess.pgn.read_game, file), None)
                for number, game in enumerate(games, 1):
                    try:
                        rows += rows_of_game(game)
                    except ValueError as error:
                        self.skipped.append(f"{path}, game {number}: {error}")
        order = stream(self.seed, "chess files").permutation(len(rows))
        return [rows[place] for place in order]


def rows_of_game(game: chess.pgn.Game) -> list[Row]:
    """A row for each move of the main line. Raises ValueError for what is no game of chess."""
    board = game.board()
    moves = list(game.mainline_moves())
    is_chess = type(board) is chess.Board and not board.chess960 and all(moves)  # no null move
    if game.errors or not is_chess or not is_valid_fen(render(board)):
        raise ValueError("a move or the first position is not one of chess")
    rows = []
    for move in moves:
        # the question is the position, without an en passant square that no pawn can use
        question = position_key(board.fen())
        fen = render(board)
        rows.append(Row(question, question_about(fen, move.uci()), position_is_held_out(fen)))
        board.push(move)
    return rows

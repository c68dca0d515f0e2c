"""The chess task with the positions of your games: a task of your own that reads files of its own.

    minigrpo train --task examples/chess_games.py --data games.pgn,more.pgn.gz

Each move of the main line of a game is a question. A game that breaks the rules is skipped.
"""

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import chess.pgn

from minigrpo.fen import is_valid_fen, position_key, write_fen
from minigrpo.rng import stream
from minigrpo.tasks.base import Rows
from minigrpo.tasks.chess_env import ChessEnv, position_is_held_out, question_about
from minigrpo.tasks.rows import Row

chess.pgn.LOGGER.disabled = True  # bad games are counted, not printed


class ChessGames(Rows):
    """The rewards of chess-env. Rows with the same position are one question, whatever the move."""

    reward_weights = ChessEnv.reward_weights
    score = ChessEnv.score
    speculate = True

    def __init__(
        self, seed: int, data: Sequence[Path] = (), eval_data: Sequence[Path] = ()
    ) -> None:
        self.skipped: list[str] = []  # "FILE, game 3: why"
        super().__init__(seed, data, eval_data)
        if self.skipped:
            self.about += f"; skipped {len(self.skipped)}, such as {self.skipped[0]}"

    def read(self, files: Sequence[Path], argument: str = "data") -> list[Row]:
        """The rows in a random order, because the positions of one game are alike."""
        rows = []
        for path in files:
            open_text: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
            with open_text(path, "rt", encoding="utf-8-sig", errors="replace") as file:
                games = iter(partial(chess.pgn.read_game, file), None)
                for number, game in enumerate(games, 1):
                    try:
                        rows += rows_of_game(game)
                    except ValueError as error:
                        self.skipped.append(f"{path}, game {number}: {error}")
        order = stream(self.seed, "chess files").permutation(len(rows))
        return [rows[place] for place in order]

    def choose_held_out(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The positions that self-play holds out, unless the games have only such, or none."""
        fens = [row.example.prompt.removeprefix("A: ").split("+")[0] for row in rows]
        tests = [row for row, fen in zip(rows, fens, strict=True) if position_is_held_out(fen)]
        return tests if 0 < len(tests) < len(rows) else super().choose_held_out(rows)


def rows_of_game(game: chess.pgn.Game) -> list[Row]:
    """A row for each move of the main line. Raises ValueError if it is not a game of chess."""
    board = game.board()
    moves = list(game.mainline_moves())
    is_chess = type(board) is chess.Board and not board.chess960 and all(moves)  # no null move
    if game.errors or not is_chess or not is_valid_fen(write_fen(board)):
        raise ValueError("a move or the first position is not one of chess")
    rows = []
    for move in moves:
        # `board.fen()` leaves out an en passant square that no pawn can use
        question = position_key(board.fen())
        fen = write_fen(board)
        example = question_about(fen, move.uci())
        rows.append(Row(question, example))
        board.push(move)
    return rows

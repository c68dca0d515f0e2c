"""Chess questions from files: games (.pgn, .pgn.gz), and RookWorld's lines of text (any other).

Each ply of the main line of a game is a question; a line of text is a question and its answer, as
they stand. Whatever breaks the rules of chess is skipped: a whole game, or a line.
"""

import gzip
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TextIO

import chess
import chess.pgn

from ..fen import is_valid_fen, position_key, render, transition
from ..runtime.rng import stream
from ..types import Example
from .data import Files, Row, Rows
from .self_play import position_is_held_out, question_about

chess.pgn.LOGGER.disabled = True  # bad games are counted, not printed


class ChessFiles(Rows):
    """The questions of files. Rows with one position ask the same, whatever the move."""

    def __init__(self, seed: int, data: Files, eval_data: Files) -> None:
        self.speculate = True
        self.skipped: list[str] = []  # "FILE, record 3: why"
        super().__init__(seed, data, eval_data, parse_line)
        if self.skipped:
            self.about += f"; skipped {len(self.skipped)}, such as {self.skipped[0]}"

    def read(self, files: Files) -> list[Row]:
        """The rows in a random order, because the positions of one game are alike."""
        rows = []
        for path in map(str, files):
            open_text: Callable[..., TextIO] = gzip.open if path.endswith(".gz") else open
            with open_text(path, "rt", encoding="utf-8-sig", errors="replace") as file:
                games = iter(partial(chess.pgn.read_game, file), None)
                lines = filter(None, map(str.strip, file))
                has_games = path.endswith((".pgn", ".pgn.gz"))
                records: Iterator[chess.pgn.Game | str] = games if has_games else lines
                for number, record in enumerate(records, 1):
                    try:
                        if isinstance(record, str):
                            rows.append(parse_line(record))
                        else:
                            rows += rows_of_game(record)
                    except ValueError as error:
                        self.skipped.append(f"{path}, record {number}: {error}")
        order = stream(self.seed, "chess files").permutation(len(rows))
        return [rows[place] for place in order]

    def choose_held_out(self, rows: Sequence[Row]) -> Sequence[Row]:
        """One position in four, as in self-play, unless that is none or all of a few."""
        chosen = [row for row in rows if position_is_held_out(position_of(row.example))]
        return chosen if 0 < len(chosen) < len(rows) else super().choose_held_out(rows)


def position_of(example: Example) -> str:
    return example.prompt.removeprefix("A: ").partition("+")[0]


def row_of(example: Example) -> Row:
    """A row. Its question is the position, without an en passant square that no pawn can use."""
    return Row(position_key(chess.Board(position_of(example)).fen()), example)


def rows_of_game(game: chess.pgn.Game) -> list[Row]:
    """A row for each move of the main line. Raises ValueError for what is no game of chess."""
    board = game.board()
    moves = list(game.mainline_moves())
    is_chess = type(board) is chess.Board and not board.chess960 and all(moves)  # no null move
    if game.errors or not is_chess or not is_valid_fen(render(board)):
        raise ValueError("a move or the first position is not one of chess")
    rows = []
    for move in moves:
        rows.append(row_of(question_about(render(board), move.uci())))
        board.push(move)
    return rows


def parse_line(text: str) -> Row:
    """The row of a line of RookWorld's, which is kept exactly as it stands.

        A: <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>

    The prefix `A: ` and the history may be missing. An en passant square may be given after every
    double pawn step, or only where a pawn can capture; an illegal move is worth 0.0 or -1.0. Raises
    ValueError for what contradicts the rules of chess, or the position alone: a draw by repetition.
    """
    line = text.removeprefix("A: ")
    fields = line.split("+")
    if len(fields) not in (6, 7) or not is_valid_fen(fields[0]):
        raise ValueError("not <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>")
    fen, uci = fields[:2]
    answer = "+".join(fields[-4:])
    true_answer, kind = transition(fen, uci)
    true_after, _, ending = true_answer.partition("+")
    spellings = (true_answer, f"{chess.Board(true_after).fen()}+{ending}")
    if answer.replace("-1.0+0+1", "0.0+0+1") not in spellings:
        raise ValueError(f"{uci} does not lead to {answer}")
    return row_of(Example(f"A: {line.removesuffix(answer)}", answer, kind=kind))

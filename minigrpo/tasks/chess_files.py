"""Chess questions from files: games (.pgn, .pgn.gz), and RookWorld's lines of text (any other).

Each ply of the main line of a game is a question. A line of text holds a question and its answer,
exactly as the model is to read and write them. Whatever breaks the rules of chess is skipped: a
whole game, or a line.
"""

import gzip
from functools import partial
from typing import Any

import chess
import chess.pgn

from ..fen import is_valid_fen, position_key, render, transition
from ..runtime.rng import stream
from ..types import Example
from .data import Files, Row, Rows
from .self_play import ask, is_held_out

chess.pgn.LOGGER.disabled = True  # bad games are counted, not printed


class ChessFiles(Rows):
    """The questions of files, of which one position in four is held out.

    Two rows ask the same if their positions are equal, whatever the move: no position is in both
    splits, and an evaluation has each of them once.
    """

    def __init__(self, seed: int, data: Files, eval_data: Files, history: int) -> None:
        """`history`: how many earlier moves the questions about a game contain."""
        self.history = history
        self.skipped: list[str] = []  # "FILE, record 3: why"
        super().__init__(seed, data, eval_data, parse_line)
        if self.skipped:
            self.about += f"; skipped {len(self.skipped)}, such as {self.skipped[0]}"

    def read(self, files: Files) -> list[Row]:
        """The rows in a random order, because the positions of one game are alike."""
        rows = list[Row]()
        for path in map(str, files):
            opened: Any = gzip.open if path.endswith(".gz") else open
            with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
                games = iter(partial(chess.pgn.read_game, file), None)
                is_pgn = path.endswith((".pgn", ".pgn.gz"))
                records: Any = games if is_pgn else filter(None, map(str.strip, file))
                for number, record in enumerate(records, 1):
                    try:
                        rows += plies(record, self.history) if is_pgn else [parse_line(record)]
                    except ValueError as error:
                        self.skipped.append(f"{path}, record {number}: {error}")
        order = stream(self.seed, "chess files").permutation(len(rows))
        return [rows[place] for place in order]


def position_of(example: Example) -> str:
    """The FEN in a prompt."""
    return example.prompt.removeprefix("A: ").partition("+")[0]


def row_of(example: Example) -> Row:
    """A row, whose question is the position.

    A line may leave out an en passant square where no pawn can capture; the question always does.
    """
    fen = position_of(example)
    return Row(position_key(chess.Board(fen).fen()), example, is_held_out(fen))


def plies(game: chess.pgn.Game, history: int) -> list[Row]:
    """A row for each move of the main line. Raises ValueError for what is no game of chess."""
    board, moves = game.board(), list(game.mainline_moves())
    variant = type(board) is not chess.Board or board.chess960
    if game.errors or variant or not is_valid_fen(render(board)) or not all(moves):
        raise ValueError("a move or the first position is not one of chess")
    rows, earlier = list[Row](), list[str]()
    for move in moves:
        rows.append(row_of(ask(render(board), move.uci(), earlier, history)))
        board.push(move)
        earlier.append(move.uci())
    return rows


def parse_line(text: str) -> Row:
    """The row of a line of RookWorld's, which is kept exactly as it stands.

        A: <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>

    The prefix `A: ` and the history may be missing. An en passant square may be given after every
    double pawn step, or only where a pawn can capture; an illegal move is worth 0.0 or -1.0.

    Raises ValueError for a line that contradicts the rules of chess, or what its position alone
    tells: a draw by repetition.
    """
    line = text.removeprefix("A: ")
    fields = line.split("+")
    if len(fields) not in (6, 7) or not is_valid_fen(fields[0]):
        raise ValueError("not <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>")
    fen, uci, after, ending = fields[0], fields[1], fields[-4], "+".join(fields[-3:])
    true_answer, kind = transition(fen, uci)
    true_fen, _, true_ending = true_answer.partition("+")
    spelled = after in (true_fen, chess.Board(true_fen).fen())
    if not spelled or ending.replace("-1.0+0+1", "0.0+0+1") != true_ending:
        raise ValueError(f"{uci} does not lead to {after}+{ending}")
    answer = f"{after}+{ending}"
    return row_of(Example(f"A: {line.removesuffix(answer)}", answer, kind=kind))

"""Real games: each ply of each mainline of a PGN file is an example of the chess-env task.

Comments, clocks and variations are not looked at; a game that was broken off gives what was played.
Games are kept as moves, two bytes a ply, and played again up to the ply that is asked for: the text
is read once, so it may be compressed. A game with an illegal move, a null move, a start that is no
position or rules of its own (Chess960, Crazyhouse) is skipped as a whole.
"""

import gzip
import io
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import chess
import chess.pgn
import numpy as np

from ..types import Example
from .chess_env import is_held_out, move_kind, ply_kind, prompt_of, render, transition
from .fen import is_valid_fen
from .files import Listener, Shuffled, Silent, Skipped, fingerprint, readable

HEADER = re.compile(
    r'\[[A-Za-z0-9_]+ +"'
)  # and not a clock that a comment's line begins with: [%clk 0:01]


class Mainline(chess.pgn.BaseVisitor["Mainline"]):
    """One game as python-chess reads it to us: its start, its moves, which of its positions are
    held out, what is wrong.
    """

    def begin_game(self) -> None:
        self.start = ""  # a FEN, if it is not the usual one
        self.moves = array("H")
        self.held_out = array("B")
        self.questions = array("Q")  # of the positions that are held out
        self.error = ""

    def begin_headers(self) -> chess.pgn.Headers:
        self.headers = chess.pgn.Headers({})
        return self.headers

    def visit_header(self, tagname: str, tagvalue: str) -> None:
        self.headers[tagname] = tagvalue

    def end_headers(self) -> chess.pgn.SkipType | None:
        try:
            board = self.headers.board()
        except ValueError as error:
            self.error = str(error)
            return chess.pgn.SKIP
        fen = render(board)
        if type(board) is not chess.Board or board.chess960:
            self.error = f"the rules are those of {self.headers.get('Variant', 'Chess960')}"
        elif not is_valid_fen(fen):
            self.error = f"starts from an impossible position: {fen}"
        elif fen != chess.STARTING_FEN:
            self.start = fen
        return chess.pgn.SKIP if self.error else None

    def begin_variation(self) -> chess.pgn.SkipType:
        return chess.pgn.SKIP

    def visit_move(self, board: chess.Board, move: chess.Move) -> None:
        if not move:
            self.error = self.error or f"a null move at ply {len(self.moves) + 1}"
        elif not self.error:
            self.moves.append(pack(move))
            fen = render(board)
            self.held_out.append(is_held_out(fen))
            if self.held_out[-1]:
                self.questions.append(fingerprint(f"{' '.join(fen.split(' ')[:4])} {move.uci()}"))

    def handle_error(self, error: Exception) -> None:
        self.error = self.error or str(error)

    def result(self) -> "Mainline":
        return self


def pack(move: chess.Move) -> int:
    return move.from_square | move.to_square << 6 | (move.promotion or 0) << 12


def unpack(code: int) -> chess.Move:
    return chess.Move(code & 63, code >> 6 & 63, code >> 12 or None)


def read_games(text: TextIO) -> Iterator[Mainline]:
    """The games of a PGN text, each read apart: a comment that never ends does not swallow the
    games that follow.
    """
    for chunk in _chunks(text):
        handle = io.StringIO(chunk)
        endless = chunk.rfind("{") > chunk.rfind("}")
        while (game := chess.pgn.read_game(handle, Visitor=Mainline)) is not None:
            if endless and handle.tell() == len(chunk):
                game.handle_error(ValueError("a comment that never ends"))
            yield game


def _chunks(text: TextIO) -> Iterator[str]:
    """Headers with what follows them, up to the next headers."""
    lines: list[str] = []
    in_headers = True
    for line in text:
        is_header = HEADER.match(line) is not None
        if is_header and not in_headers:
            yield "".join(lines)
            lines = []
        in_headers = is_header or (in_headers and not line.strip())
        lines.append(line)
    yield "".join(lines)


class Games(Shuffled):
    """The examples of `--data FILE.pgn` or `FILE.pgn.gz`; one is a ply, counted through all
    games."""

    heads = ("A: ",)

    def __init__(
        self, path: Path, seed: int, history: int = 0, listener: Listener | None = None
    ) -> None:
        """Raises ValueError, in one line, for a file that cannot be read or has too few
        positions."""
        listener, skipped = listener or Silent(), Skipped(path, "game")
        self.history = history
        self.starts: dict[int, str] = {}
        moves, held_out, questions, first, number = (
            array("H"),
            array("B"),
            array("Q"),
            array("q"),
            0,
        )
        with (
            readable(path),
            open(path, "rb") as raw,
            listener.reading(path.name, path.stat().st_size) as progress,
        ):
            data = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for number, game in enumerate(
                read_games(io.TextIOWrapper(data, encoding="utf-8", errors="replace")), 1
            ):
                progress(raw.tell())
                if game.error:
                    skipped.add(number, game.error)
                    continue
                if game.start:
                    self.starts[len(first)] = game.start
                first.append(len(moves))
                moves += game.moves
                held_out += game.held_out
                questions += game.questions
        skipped.report(number, listener)
        self.moves, self.first = (
            np.asarray(moves, dtype=np.uint16),
            np.asarray(first, dtype=np.int64),
        )
        split = np.asarray(held_out, dtype=bool)
        super().__init__(
            path,
            seed,
            np.flatnonzero(~split),
            np.flatnonzero(split),
            np.asarray(questions, dtype=np.uint64),
        )

    def example(self, key: int, index: int) -> Example:
        game = int(np.searchsorted(self.first, key, side="right")) - 1
        *before, move = (unpack(int(code)) for code in self.moves[self.first[game] : key + 1])
        board = chess.Board(self.starts.get(game, chess.STARTING_FEN))
        for earlier in before:
            board.push(earlier)
        fen, kind = render(board), move_kind(board, move)
        board.push(move)
        told = ",".join(earlier.uci() for earlier in before[max(0, len(before) - self.history) :])
        prompt = prompt_of(fen, move.uci(), told if self.history else None)
        return Example(prompt, transition(fen, move.uci()), index, ply_kind(board, kind))

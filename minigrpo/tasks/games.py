"""Real games: each ply of each main line of a PGN file is an example of the chess-env task.

Comments, clocks and variations are ignored. An unfinished game contributes the moves that were
played. A whole game is skipped if it has an illegal move, a null move or an impossible starting
position, or if it is a chess variant (Chess960, Crazyhouse).

The text is read once, so the file may be compressed. Games are kept as moves, two bytes per ply,
and are replayed up to the requested ply.
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
from .fen import is_valid_fen
from .files import (
    Listener,
    ShuffledExamples,
    SilentListener,
    SkippedRecords,
    check_is_text,
    open_data,
    readable,
)
from .splits import fingerprint, is_held_out, position_key
from .transitions import PROMPT_PREFIX, move_kind, ply_kind, prompt_of, render, transition

# matches a header, but not a clock at the start of a line in a comment: [%clk 0:01]
HEADER = re.compile(r'\[[A-Za-z0-9_]+ +"')


class MainLine(chess.pgn.BaseVisitor["MainLine"]):
    """Collects one game while python-chess parses it.

    Attributes:
        start: the FEN that it starts from, "" for the usual one.
        moves: one packed move per ply, see `pack`.
        held_out: for each ply, whether its position is held out.
        questions: for each held-out ply, a hash of position and move.
        error: why the game is skipped, "" if it is not.
    """

    def begin_game(self) -> None:
        self.start = ""
        self.moves = array("H")
        self.held_out = array("B")
        self.questions = array("Q")
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
            self.error = f"it is a chess variant: {self.headers.get('Variant', 'Chess960')}"
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
                self.questions.append(fingerprint(f"{position_key(fen)} {move.uci()}"))

    def handle_error(self, error: Exception) -> None:
        self.error = self.error or str(error)

    def result(self) -> "MainLine":
        return self


def pack(move: chess.Move) -> int:
    """Return a move as 16 bits: from (6), to (6), promotion piece (4)."""
    return move.from_square | move.to_square << 6 | (move.promotion or 0) << 12


def unpack(code: int) -> chess.Move:
    """Undo `pack`."""
    return chess.Move(code & 63, code >> 6 & 63, code >> 12 or None)


def read_games(text: TextIO) -> Iterator[MainLine]:
    """Yield the games of a PGN text.

    Each is parsed separately, so that a comment that is never closed cannot swallow the games after
    it.
    """
    for chunk in _chunks(text):
        handle = io.StringIO(chunk)
        unclosed = chunk.rfind("{") > chunk.rfind("}")
        while (game := _read_game(handle)) is not None:
            if unclosed and handle.tell() == len(chunk):
                game.handle_error(ValueError("a comment that never ends"))
            yield game


def _read_game(handle: TextIO) -> MainLine | None:
    """The next game, or None at the end. What python-chess cannot parse is one bad game."""
    try:
        return chess.pgn.read_game(handle, Visitor=MainLine)
    except (ValueError, LookupError, RecursionError) as error:  # an annotation of 5,000 digits
        handle.seek(0, io.SEEK_END)
        game = MainLine()
        game.begin_game()
        game.handle_error(error)
        return game


def _chunks(text: TextIO) -> Iterator[str]:
    """Cut a PGN text before each block of headers."""
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


class Games(ShuffledExamples):
    """The examples of `--data FILE.pgn` or `FILE.pgn.gz`. An example's key is its ply, counted
    through all games of the file.
    """

    prompt_prefixes = (PROMPT_PREFIX,)

    def __init__(
        self, path: Path, seed: int, history: int = 0, listener: Listener | None = None
    ) -> None:
        """
        Args:
            history: how many earlier moves each prompt contains.
            listener: receives progress and skipped games.

        Raises:
            ValueError: in one line, for a file that cannot be read, or a split without positions.
        """
        listener, skipped = listener or SilentListener(), SkippedRecords(path, "game")
        self.history = history
        self.starts: dict[int, str] = {}  # game -> the FEN that it starts from, if not the usual
        moves, held_out, questions = array("H"), array("B"), array("Q")
        first, number = array("q"), 0  # the first ply of each game
        with (
            readable(path),
            open_data(path) as raw,
            listener.reading(path.name, path.stat().st_size) as progress,
        ):
            data = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            check_is_text(path, data.peek(4)[:4])  # of what is packed, too
            text = io.TextIOWrapper(data, encoding="utf-8-sig", errors="replace")
            for number, game in enumerate(read_games(text), 1):
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
        self.moves = np.asarray(moves, dtype=np.uint16)
        self.first = np.asarray(first, dtype=np.int64)
        split = np.asarray(held_out, dtype=bool)
        hashes = np.asarray(questions, dtype=np.uint64)
        super().__init__(path, seed, np.flatnonzero(~split), np.flatnonzero(split), hashes)

    def example(self, key: int, index: int) -> Example:
        """Return ply `key` of the file, by replaying its game up to there."""
        game = int(np.searchsorted(self.first, key, side="right")) - 1
        *before, move = (unpack(int(code)) for code in self.moves[self.first[game] : key + 1])
        board = chess.Board(self.starts.get(game, chess.STARTING_FEN))
        for earlier in before:
            board.push(earlier)
        fen, kind = render(board), move_kind(board, move)
        board.push(move)
        recent = before[max(0, len(before) - self.history) :]
        history = ",".join(earlier.uci() for earlier in recent) if self.history else None
        prompt = prompt_of(fen, move.uci(), history)
        return Example(prompt, transition(fen, move.uci()), index, ply_kind(board, kind))

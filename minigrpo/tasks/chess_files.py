"""Chess questions from files, in memory: games (.pgn, .pgn.gz) and RookWorld's text lines (.txt).

Each ply of the main line of a game is a chess-env question. A line of text holds a question and its
answer, exactly as the model shall read and write them; chess_env.py and best_move.py say how. What
breaks the rules of chess is skipped: a whole game, or a line.
"""

import gzip
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.pgn
import numpy as np

from ..fen import is_valid_fen, position_key, render
from ..runtime.rng import stream
from ..task import Task
from ..types import ConfigError, Example
from .base import fingerprint
from .self_play import ask, is_held_out

chess.pgn.LOGGER.setLevel(logging.CRITICAL)  # bad games are counted, not printed


class Question(NamedTuple):
    """An example of a file, and what tells whether another one asks the same."""

    example: Example
    # FENs of its position. Self-play and games write an en passant square after every double step;
    # a line of text may leave out a square where no pawn can capture, so it has both spellings.
    spellings: tuple[str, ...]
    move: str  # "" if the question is about the position alone

    @property
    def key(self) -> str:
        return f"{position_key(self.spellings[0])} {self.move}"


class ChessFiles(Task):
    """The questions of files in two splits. Each training epoch visits every one, in a new order.

    A question that occurs several times (an opening, say) is trained on as often, but evaluated
    only once.
    """

    def __init__(
        self,
        seed: int,
        files: Sequence[Path],
        held_out_files: Sequence[Path],
        parse: Callable[[str], list[Question]],
        history: int | None,
    ) -> None:
        """
        Args:
            held_out_files: are held out whole, and their positions are not trained on; without
                them, one position in four is held out. One whose spellings differ is in no split.
            parse: a line -> its questions, none for another task's; ValueError for a bad line.
            history: how many earlier moves the questions about a game contain; None refuses games.
        """
        self.seed, self.parse, self.history = seed, parse, history
        self.skipped: list[str] = []  # "FILE, record 3: why"
        train, held_out = self._read(files), self._read(held_out_files)
        if held_out_files:
            kept = {position_key(fen) for q in held_out for fen in q.spellings}
            train = [q for q in train if kept.isdisjoint(map(position_key, q.spellings))]
        else:
            held_out = [q for q in train if all(map(is_held_out, q.spellings))]
            train = [q for q in train if not any(map(is_held_out, q.spellings))]
        first: dict[str, Question] = {}
        for question in held_out:
            first.setdefault(question.key, question)
        held_out = list(first.values())
        names = ", ".join(map(str, [*files, *held_out_files]))
        self.about = f"{len(train)} questions and {len(held_out)} held-out ones: {names}"
        if self.skipped:
            self.about += f"; skipped {len(self.skipped)}, such as {self.skipped[0]}"
        if not held_out or (files and not train):
            raise ConfigError(f"--data has no questions for one of the splits: {self.about}")
        order = stream(seed, "file/held-out", 0).permutation(len(held_out))
        self._train = [question.example for question in train]
        self._held_out = [held_out[place].example for place in order]
        self.num_held_out = len(held_out)
        self.questions = _hashes(train), _hashes(held_out)
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._train))
        return replace(self._train[self._order(epoch)[place]], index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)], index=number)

    def longest(self, number: int) -> list[Example]:
        every = [*self._train, *self._held_out]
        return sorted(every, key=lambda x: -len(x.prompt) - len(x.answer))[:number]

    def _shuffle(self, epoch: int) -> np.ndarray:
        return stream(self.seed, "file/train", epoch).permutation(len(self._train))

    def _read(self, files: Sequence[Path]) -> list[Question]:
        questions = list[Question]()
        for path in files:
            records, parse = self._records(path)
            for number, record in enumerate(records, 1):
                try:
                    questions += parse(record)
                except ValueError as error:
                    self.skipped.append(f"{path}, record {number}: {error}")
        return questions

    def _records(self, path: Path) -> tuple[Iterator[Any], Callable[[Any], list[Question]]]:
        """The lines or the games of a file, and what makes questions of one."""
        if path.suffix == ".txt":
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            return (line.strip() for line in text.split("\n")), self.parse
        if path.name.endswith((".pgn", ".pgn.gz")) and self.history is not None:
            return _games(path), partial(_plies, history=self.history)
        endings = ".txt" if self.history is None else ".pgn, .pgn.gz or .txt"
        raise ConfigError(f"--data {path}: this task reads files that end with {endings}")


def _games(path: Path) -> Iterator[chess.pgn.Game]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        while (game := chess.pgn.read_game(file)) is not None:
            yield game


def _plies(game: chess.pgn.Game, history: int) -> list[Question]:
    """A question for each move of the main line."""
    board, moves = game.board(), list(game.mainline_moves())
    variant = type(board) is not chess.Board or board.chess960
    if game.errors or variant or not is_valid_fen(render(board)) or not all(moves):
        raise ValueError("a move or the first position is not one of chess")
    questions, earlier = list[Question](), list[str]()
    for move in moves:
        fen, uci = render(board), move.uci()
        questions.append(Question(ask(fen, uci, earlier, history), (fen,), uci))
        board.push(move)
        earlier.append(uci)
    return questions


def _hashes(questions: Sequence[Question]) -> np.ndarray:
    return np.unique(np.array([fingerprint(x.key) for x in questions], dtype=np.uint64))

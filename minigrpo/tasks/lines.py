"""One question and its answer per line: RookWorld's text files, and the JSONL that
`minigrpo.tools.annotate` writes.

    P: <FEN> M: <moves> E: <evaluations> B: <best move>                  see best_move.py
    A: <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>    see chess_env.py

In the second form the prefix `A: ` and the history may be missing.

**Text is kept exactly as written in the file**: the padding of P lines, the format of the history,
the en passant convention, the reward for an illegal move (0.0 or -1.0). A model that was trained on
such lines has learned these. A line that contradicts the rules of chess is skipped. An en passant
square may be given after every double pawn step, or only where a pawn can capture. A draw by
repetition cannot be seen in a single position; it is accepted if enough moves without capture or
pawn move came before.

One pass records the offset and a checksum of each valid line. A line is read from the file when its
example is requested.
"""

import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import chess
import numpy as np

from ..runtime.flags import ConfigError
from ..types import Example
from . import best_move, transitions
from .data_lines import data_lines, decode_line, parse_example
from .fen import is_valid_fen
from .files import Listener, ShuffledExamples, SilentListener, SkippedRecords, open_data, readable
from .splits import fingerprint, split_of
from .transitions import ending_of, move_kind, ply_kind

MAX_LINE_BYTES = 4096
# plies without capture or pawn move before a position can occur for the fifth time
PLIES_TO_FIFTH_OCCURRENCE = 16
EN_PASSANT: tuple[Literal["fen", "legal", "xfen"], ...] = ("fen", "legal", "xfen")
PROGRESS_BYTES = 1 << 16  # between progress reports
LONGEST_LINES = 512  # that `Lines.longest` yields
PAIRS_HINT = "; prompts and answers that are not about chess need --task prompts"


class Line(NamedTuple):
    """A valid line."""

    prompt: str
    answer: str
    spellings: tuple[str, str]  # FENs of the position, in both en passant conventions
    kind: str
    fields: Mapping[str, Any] = {}


def text_line(text: str) -> Line:
    """Parse a line of a RookWorld text file. Raises ValueError that says what is wrong with it."""
    return _best_move_line(text) if text.startswith("P:") else _chess_env_line(text)


def json_line(text: str) -> Line:
    """Parse a line that `minigrpo.tools.annotate` wrote. Raises ValueError as `text_line` does."""
    found = parse_example(text)
    if found.messages:
        raise ValueError("an annotated position has a prompt, not messages")
    board = best_move.check(found.prompt, found.answer)
    return Line(found.prompt, found.answer, _spellings(board), best_move.KIND, found.fields)


def _best_move_line(text: str) -> Line:
    head, found, _ = text.partition("M:")
    if not found:
        raise ValueError("a P line without M:")
    prompt = head.rstrip()
    board = best_move.check(prompt, text[len(prompt) :])
    return Line(prompt, text[len(prompt) :], _spellings(board), best_move.KIND)


def _chess_env_line(text: str) -> Line:
    text = text.removeprefix(transitions.PROMPT_PREFIX)
    fields = text.split("+")
    if len(fields) not in (6, 7):
        raise ValueError(
            f"{len(fields)} fields, where fen+move+history+fen+reward+terminated+truncated has 7"
        )
    (fen, uci, *history), after, *ending = fields[:-4], *fields[-4:]
    if not is_valid_fen(fen):
        raise ValueError(f"no valid position: {fen}")
    board = chess.Board(fen)
    spellings, allowed, kind = _spellings(board), {"0.0+0+1", "-1.0+0+1"}, "illegal"
    if move := _legal_move(board, uci):
        kind = move_kind(board, move)
        board.push(move)
        allowed, kind = {ending_of(board)}, ply_kind(board, kind)
        if history and board.halfmove_clock >= PLIES_TO_FIFTH_OCCURRENCE:
            allowed.add("0.5+1+0")
    truths = [board.fen(en_passant=convention) for convention in EN_PASSANT]
    if after not in truths:
        raise ValueError(f"{uci} leads to {truths[0]}, not to {after}")
    if "+".join(ending) not in allowed:
        raise ValueError(f"{uci} ends with {' or '.join(sorted(allowed))}, not {'+'.join(ending)}")
    answer = "+".join([after, *ending])
    return Line(transitions.PROMPT_PREFIX + text.removesuffix(answer), answer, spellings, kind)


def _spellings(board: chess.Board) -> tuple[str, str]:
    """The FENs of a position: as given, and without an en passant square of no use."""
    return board.fen(en_passant="fen"), board.fen()


def _legal_move(board: chess.Board, uci: str) -> chess.Move | None:
    try:
        move = chess.Move.from_uci(uci)
    except ValueError:
        return None
    return move if board.is_legal(move) else None


class Lines(ShuffledExamples):
    """The examples of a text or JSONL file. An example's key is the byte at which its line
    begins.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        parse: Callable[[str], Line],
        prompt_prefixes: Sequence[str] = (transitions.PROMPT_PREFIX, best_move.PROMPT_PREFIX),
        listener: Listener | None = None,
    ) -> None:
        """
        Args:
            parse: `text_line` or `json_line`.
            prompt_prefixes: how the wanted prompts begin; other valid lines are ignored.
            listener: receives progress and skipped lines.

        Raises:
            ValueError: in one line, for a file that cannot be read, or a split without examples.
        """
        listener, skipped = listener or SilentListener(), SkippedRecords(path, "line")
        self.parse = parse
        starts, numbers = array("q"), array("L")  # of each usable line: its first byte, its number
        sizes, sums, is_held_out = array("H"), array("I"), array("B")
        questions, found, number = array("Q"), set[str](), 0
        with readable(path), listener.reading(path.name, path.stat().st_size) as progress:
            self.file, reported = open_data(path), 0
            for number, start, raw in data_lines(self.file):
                if start - reported >= PROGRESS_BYTES:
                    reported = start
                    progress(start)
                try:
                    line = parse(_decode(raw))
                except ValueError as error:
                    skipped.add(number, error)
                    continue
                prefix = next((x for x in prompt_prefixes if line.prompt.startswith(x)), None)
                if prefix is None:
                    continue
                found.add(prefix)
                if (held_out := split_of(line.spellings)) is None:
                    continue
                starts.append(start)
                numbers.append(number)
                sizes.append(len(raw))
                sums.append(zlib.crc32(raw.strip()))
                is_held_out.append(held_out)
                if held_out:
                    questions.append(fingerprint(line.prompt))
        skipped.report(number, listener)
        self.path, self.prompt_prefixes = path, tuple(sorted(found))
        self.starts, self.numbers = np.asarray(starts, dtype=np.int64), np.asarray(numbers)
        self.sizes, self.sums = np.asarray(sizes), np.asarray(sums)
        split, hashes = np.asarray(is_held_out, dtype=bool), np.asarray(questions, dtype=np.uint64)
        hint = PAIRS_HINT if parse is json_line and skipped.count == number else ""
        super().__init__(path, seed, self.starts[~split], self.starts[split], hashes, hint)

    def example(self, key: int, index: int) -> Example:
        """Return the example whose line begins at byte `key`.

        Raises:
            ConfigError: the line is not what it was when the file was read.
        """
        # pread, because threads would share the file's position
        raw = os.pread(self.file.fileno(), MAX_LINE_BYTES, key).split(b"\n", 1)[0]
        # another valid line may be there now, perhaps one of the other split
        if zlib.crc32(raw.strip()) != self.sums[np.searchsorted(self.starts, key)]:
            raise ConfigError(f"{self._where(key)}: was changed during the run")
        line = self.parse(_decode(raw))
        return Example(line.prompt, line.answer, index, line.kind, fields=line.fields)

    def longest(self) -> Iterator[tuple[str, Example]]:
        """Yield the examples of the longest lines, most bytes first, each with its file and line.

        Not more than `LONGEST_LINES`, because each is parsed by the rules of chess.
        """
        for place in np.argsort(-self.sizes.astype(int), kind="stable")[:LONGEST_LINES]:
            key = int(self.starts[place])
            yield self._where(key), self.example(key, 0)

    def _where(self, key: int) -> str:
        """The file and the line that begins at byte `key`."""
        return f"--data {self.path}, line {self.numbers[np.searchsorted(self.starts, key)]}"


def _decode(raw: bytes) -> str:
    """A line as text. Raises ValueError if it is too long or not UTF-8."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    return decode_line(raw)

"""A question and its answer a line: RookWorld's text files, and the JSONL that
`minigrpo.tools.annotate` writes.

    P: <FEN> M: <moves> E: <evaluations> B: <best move>                            what to play, see policy.py
    A: <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>              what follows, see chess_env.py

The head `A: ` may be missing, and so may the history. **A line is taken to the letter**: padding of
P lines, how a history is written, which en passant convention and which reward of an illegal move
(0.0 or -1.0) are those of the file, because they are what a model that comes with it has learnt.
What a line says must be so by the rules of chess, or it is damaged. An en passant square may stand
behind every double step, or only where a pawn can capture. A draw by repetition, which the rules of
one position do not tell, is believed where the clock leaves room for one.

One pass notes where the good lines are; a line is read again when it is asked for.
"""

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import chess
import numpy as np

from ..types import Example
from .best_move import KIND as POLICY_KIND
from .best_move import check
from .chess_env import ending_of, is_held_out, move_kind, ply_kind
from .fen import is_valid_fen
from .files import Listener, Shuffled, Silent, Skipped, fingerprint, readable

LONGEST_LINE = 4096
PLIES_OF_FIVE_TIMES = (
    16  # that a position comes for the fifth time takes so many without capture or pawn move
)
EN_PASSANT: tuple[Literal["fen", "legal", "xfen"], ...] = ("fen", "legal", "xfen")
BYTES_BETWEEN_NEWS = 1 << 16


class Line(NamedTuple):
    prompt: str
    answer: str
    position: str  # that is held out or not, in one en passant convention
    kind: str


def text_line(text: str) -> Line:
    """A line of a RookWorld text file. Raises ValueError that says what is wrong with it."""
    return policy_line(text) if text.startswith("P:") else environment_line(text)


def policy_line(text: str) -> Line:
    head, found, _ = text.partition("M:")
    if not found:
        raise ValueError("a P line without M:")
    prompt = head.rstrip()
    board = check(prompt, text[len(prompt) :])
    return Line(prompt, text[len(prompt) :], board.fen(), POLICY_KIND)


def environment_line(text: str) -> Line:
    fields = text.removeprefix("A: ").split("+")
    if len(fields) not in (6, 7):
        raise ValueError(
            f"{len(fields)} fields, where fen+move+history+fen+reward+terminated+truncated has 7"
        )
    (fen, uci, *history), after, *ending = fields[:-4], *fields[-4:]
    if not is_valid_fen(fen):
        raise ValueError(f"no position: {fen}")
    board = chess.Board(fen)
    position, allowed = board.fen(), {"0.0+0+1", "-1.0+0+1"}
    move = _legal(board, uci)
    kind = "illegal"
    if move:
        kind = move_kind(board, move)
        board.push(move)
        allowed, kind = {ending_of(board)}, ply_kind(board, kind)
        if history and board.halfmove_clock >= PLIES_OF_FIVE_TIMES:
            allowed.add("0.5+1+0")
    truths = [board.fen(en_passant=convention) for convention in EN_PASSANT]
    if after not in truths:
        raise ValueError(f"{uci} leads to {truths[0]}, not to {after}")
    if "+".join(ending) not in allowed:
        raise ValueError(f"{uci} ends with {' or '.join(sorted(allowed))}, not {'+'.join(ending)}")
    answer = "+".join([after, *ending])
    return Line("A: " + text.removeprefix("A: ").removesuffix(answer), answer, position, kind)


def _legal(board: chess.Board, uci: str) -> chess.Move | None:
    try:
        move = chess.Move.from_uci(uci)
    except ValueError:
        return None
    return move if board.is_legal(move) else None


def json_line(text: str) -> Line:
    """A line of what `minigrpo.tools.annotate` writes."""
    try:
        record = json.loads(text)
        prompt, answer = record["prompt"], record["answer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('no object like {"prompt": "P: ...", "answer": "M: ..."}') from None
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise ValueError("prompt and answer must be text")
    check(prompt, answer)
    return Line(prompt, answer, prompt.removeprefix("P: "), POLICY_KIND)


class Lines(Shuffled):
    """The examples of a text file, as `read` understands its lines; one is the place of its
    line."""

    def __init__(
        self,
        path: Path,
        seed: int,
        read: Callable[[str], Line],
        heads: str = "AP",
        listener: Listener | None = None,
    ) -> None:
        """Raises ValueError, in one line, for a file that cannot be read or has too few good lines
        of the wanted kinds.

        Args:
            heads: which questions are wanted, by the first letter of their prompts; the others are
                passed over.
        """
        listener, skipped, self.read = listener or Silent(), Skipped(path, "line"), read
        train, held_out, questions, found = array("q"), array("q"), array("Q"), set[str]()
        number = offset = told = 0
        with readable(path), listener.reading(path.name, path.stat().st_size) as progress:
            self.file = open(path, "rb")
            for number, raw in enumerate(self.file, 1):
                if raw.strip():
                    try:
                        line = read(_decode(raw))
                    except ValueError as error:
                        skipped.add(number, error)
                    else:
                        if line.prompt[0] in heads:
                            found.add(line.prompt[:3])
                            if is_held_out(line.position):
                                held_out.append(offset)
                                questions.append(fingerprint(line.prompt))
                            else:
                                train.append(offset)
                offset += len(raw)
                if offset - told >= BYTES_BETWEEN_NEWS:
                    told = offset
                    progress(offset)
        skipped.report(number, listener)
        self.heads = tuple(sorted(found))
        places = [np.asarray(split, dtype=np.int64) for split in (train, held_out)]
        super().__init__(path, seed, places[0], places[1], np.asarray(questions, dtype=np.uint64))

    def example(self, key: int, index: int) -> Example:
        raw = os.pread(
            self.file.fileno(), LONGEST_LINE, key
        )  # has no position that threads would share
        line = self.read(_decode(raw.split(b"\n", 1)[0]))
        return Example(line.prompt, line.answer, index, line.kind)


def _decode(raw: bytes) -> str:
    if len(raw) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE} bytes")
    return raw.decode("utf-8").strip()  # UnicodeDecodeError is a ValueError

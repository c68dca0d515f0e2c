"""The best-move task: given a position, write good moves, their evaluations, and the best move.

    prompt       P: <FEN>
    completion    M: <moves> E: <evaluations> B: <best move>

Moves are in UCI notation, up to five, best first. There is one evaluation for each move, in the
same order, in pawns, **from the point of view of the side to move**. A mate in n moves is worth
1000 - n / 100 pawns, and being mated in n moves the negative of that: 999.98 is mate in two.

A completion begins with the space between it and the prompt. So prompt and completion together are
one line of text in RookWorld-LM's format, and give the same tokens as that line. The true answers
come from a chess engine, in advance: see examples/annotate.py.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import chess

from ..fen import is_valid_fen
from ..types import ConfigError, Example
from .base import SourceTask
from .chess_files import ChessFiles, Question

PROMPT_PREFIX = "P: "
EQUALLY_WON = 10.0  # pawns; evaluations beyond this count as equal
MAX_SCORED_CHARS = 400
MOVE = "[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?[0-9]{1,4}(?:\.[0-9]{1,2})?"
# whatever is there of the three, in this order
ADVICE = re.compile(
    rf"(?:.*?M:((?: +{MOVE})+))?(?:.*?E:((?: +{NUMBER})+))?(?:.*?B: +({MOVE}))?", re.DOTALL
)


class BestMove(SourceTask):
    """Completions are scored part by part against the engine's answer.

    Parts, each in [0, 1]:
        best: the move after B: is the true best move.
        moves: how many of the true moves are listed, divided by the length of the longer list.
        evals: the sum of 1 / (1 + error in pawns) over those moves, divided by the same length.
        legal: the share of legal, distinct moves among all that are written.
        format: the text has the form above, with as many evaluations as moves.
    """

    parts: Mapping[str, float] = {
        "best": 1.0,
        "moves": 0.5,
        "evals": 0.5,
        "legal": 0.2,
        "format": 0.05,
    }
    speculate = True

    def __init__(
        self, seed: int, data: Sequence[Path] = (), eval_data: Sequence[Path] = ()
    ) -> None:
        if not (data or eval_data):
            raise ConfigError(
                "--task best-move needs --data FILE.txt; examples/annotate.py makes it"
            )
        super().__init__(ChessFiles(seed, data, eval_data, parse_line, history=None))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        true, advice = read(example.answer), read(text)
        legal = legal_moves(example.prompt.removeprefix(PROMPT_PREFIX))
        moves, true_evals = set(advice.moves), dict(zip(true.moves, true.evals, strict=True))
        # divided by the longer list, so that extra and repeated moves lower the score
        longest = max(len(advice.moves), len(true.moves))
        evals = dict(zip(advice.moves, advice.evals, strict=False))
        # sorted, because the order of a set, and so the sum's rounding, differs between processes
        both = sorted(true_evals.keys() & evals.keys())
        return {
            "best": float(advice.best == true.best),
            "moves": len(moves & true_evals.keys()) / longest,
            "evals": sum(closeness(evals[move], true_evals[move]) for move in both) / longest,
            "legal": (len(moves & legal) + (advice.best in legal)) / (len(advice.moves) + 1),
            "format": float(advice.well_formed),
        }


class Advice(NamedTuple):
    """A completion, parsed."""

    moves: list[str]
    evals: list[float]  # pawns
    best: str  # "" if there is none
    well_formed: bool


def read(text: str) -> Advice:
    """Parse any text as far as possible. Spaces do not count: RookWorld pads its lines."""
    found = ADVICE.match(text[:MAX_SCORED_CHARS])
    assert found  # every part of it may be missing
    moves, evals = ((found[part] or "").split() for part in (1, 2))
    best = found[3] or ""
    form = ["M:", *moves, "E:", *evals, "B:", best]
    well_formed = len(moves) == len(evals) and [x for x in text.split(" ") if x] == form
    return Advice(moves, [float(x) for x in evals], best, well_formed)


@lru_cache(maxsize=1 << 12)
def legal_moves(fen: str) -> frozenset[str]:
    """The legal moves of a position in UCI notation."""
    return frozenset(move.uci() for move in chess.Board(fen).legal_moves)


def closeness(a: float, b: float) -> float:
    """1 for equal evaluations, 1/2 for a pawn of difference."""
    a, b = (min(max(x, -EQUALLY_WON), EQUALLY_WON) for x in (a, b))
    return 1 / (1 + abs(a - b))


def parse_line(text: str) -> list[Question]:
    """The question of a line `P: <FEN> M: ... E: ... B: ...`; the padding stays as it is.

    Raises ValueError for a line whose position or moves are impossible; other tasks' have none.
    """
    if not text.startswith("P:"):
        return []
    prompt = text.partition("M:")[0].rstrip()
    fen, answer = prompt.removeprefix(PROMPT_PREFIX), text[len(prompt) :]
    advice = read(answer)
    distinct = len(set(advice.moves)) == len(advice.moves)
    if not (is_valid_fen(fen) and advice.well_formed and distinct):
        raise ValueError("not P: a position M: distinct moves E: as many numbers B: a move")
    if not legal_moves(fen).issuperset([*advice.moves, advice.best]):
        raise ValueError(f"an illegal move: {answer}")
    example = Example(prompt, answer, kind="best-move")
    return [Question(example, (fen, chess.Board(fen).fen()), "")]

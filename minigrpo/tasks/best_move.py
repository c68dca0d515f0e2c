"""The best-move task: given a position, write good moves, their evaluations, and the best move.

    prompt       P: <FEN>
    completion    M: <moves> E: <evaluations> B: <best move>

Moves are in UCI notation, up to five, best first. There is one evaluation for each move, in the
same order, in pawns, **from the point of view of the side to move**. A mate in n moves is worth
1000 - n / 100 pawns, and being mated in n moves the negative of that: 999.98 is mate in two.

A completion begins with the space between it and the prompt. So prompt and completion together are
one line of text in RookWorld-LM's format, and give the same tokens as that line. The true answers
are computed in advance by a chess engine, with `minigrpo.tools.annotate`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import chess
import numpy as np

from ..types import Example
from .fen import is_valid_fen
from .scoring import BatchScored

PROMPT_PREFIX, KIND = "P: ", "best-move"
MATE = 1000.0  # pawns
EQUALLY_WON = 10.0  # pawns; evaluations beyond this count as equal
MAX_SCORED_CHARS = 400
MOVE = "[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?[0-9]{1,4}(?:\.[0-9]{1,2})?"
# any number of spaces is allowed, because RookWorld's lines are padded
FORM = re.compile(rf" *M:((?: +{MOVE})+) +E:((?: +{NUMBER})+) +B: +({MOVE}) *")
MOVES = re.compile(rf"M:((?: +{MOVE})+)")
EVALS = re.compile(rf"E:((?: +{NUMBER})+)")
BEST = re.compile(rf"B: +({MOVE})")


class Advice(NamedTuple):
    """A completion, parsed."""

    moves: list[str]
    evals: list[float]  # pawns
    best: str  # "" if there is none
    well_formed: bool


def write(lines: Sequence[tuple[str, float]]) -> str:
    """Return the completion for (move, evaluation in pawns) pairs, best first."""
    moves, evals = [move for move, _ in lines], [str(round(value, 2)) for _, value in lines]
    return f" M: {' '.join(moves)} E: {' '.join(evals)} B: {moves[0]}"


def read(text: str) -> Advice:
    """Parse any text as far as possible; moves, evaluations and best move are found separately."""
    text = text[: MAX_SCORED_CHARS + 1]
    whole = FORM.fullmatch(text) if len(text) <= MAX_SCORED_CHARS else None
    if whole:
        moves, evals, best = whole.groups()
    else:
        moves, evals, best = (
            found[1] if (found := part.search(text)) else "" for part in (MOVES, EVALS, BEST)
        )
    advice = Advice(moves.split(), [float(number) for number in evals.split()], best, False)
    return advice._replace(well_formed=whole is not None and len(advice.moves) == len(advice.evals))


@lru_cache(maxsize=1 << 12)
def legal_moves(fen: str) -> frozenset[str]:
    """Return the legal moves of a position in UCI notation."""
    return frozenset(move.uci() for move in chess.Board(fen).legal_moves)


def check(prompt: str, answer: str) -> chess.Board:
    """Return the position of a question, after checking that its answer is possible.

    Raises:
        ValueError: the prompt has no valid position, or the answer is malformed, or a move in it is
            illegal or occurs twice.
    """
    fen = prompt.removeprefix(PROMPT_PREFIX)
    if not (prompt.startswith(PROMPT_PREFIX) and is_valid_fen(fen)):
        raise ValueError(f"no valid position: {prompt}")
    advice, legal = read(answer), legal_moves(fen)
    if not advice.well_formed:
        raise ValueError(f"must be M: moves E: as many numbers B: a move, got {answer}")
    if illegal := [move for move in (*advice.moves, advice.best) if move not in legal]:
        raise ValueError(f"{illegal[0]} is not legal in {fen}")
    if len(set(advice.moves)) < len(advice.moves):
        raise ValueError(f"a move occurs twice: {' '.join(advice.moves)}")
    return chess.Board(fen)


class BestMove(BatchScored):
    """Scores completions part by part against the engine's answer.

    Reward parts, each in [0, 1]:
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

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows = [_score(example, text) for example, text in zip(examples, texts, strict=True)]
        columns = np.array(rows, dtype=np.float32).reshape(-1, len(self.parts)).T
        return dict(zip(self.parts, columns, strict=True))


def _score(example: Example, text: str) -> tuple[float, ...]:
    """The values of `BestMove.parts` for one completion, in that order."""
    true_moves, true_evals, true_best = _truth(example.answer)
    advice, legal = read(text), legal_moves(example.prompt.removeprefix(PROMPT_PREFIX))
    moves = set(advice.moves)
    # divided by the longer list, so that extra and repeated moves lower the score
    longest = max(len(advice.moves), len(true_moves))
    evals = dict(zip(advice.moves, advice.evals, strict=False))
    # sorted, because the order of a set, and so the rounding of the sum, differs between processes
    both = sorted(true_moves & evals.keys())
    closeness = sum(_closeness(evals[move], true_evals[move]) for move in both)
    return (
        float(advice.best == true_best),
        len(moves & true_moves) / longest,
        closeness / longest,
        (len(moves & legal) + (advice.best in legal)) / (len(advice.moves) + 1),
        float(advice.well_formed),
    )


@lru_cache(maxsize=1 << 12)
def _truth(answer: str) -> tuple[frozenset[str], dict[str, float], str]:
    """The moves of a true answer, their evaluations, and the best move."""
    advice = read(answer)
    return frozenset(advice.moves), dict(zip(advice.moves, advice.evals, strict=True)), advice.best


def _closeness(a: float, b: float) -> float:
    a, b = (min(max(x, -EQUALLY_WON), EQUALLY_WON) for x in (a, b))
    return 1 / (1 + abs(a - b))

"""What to play: given a position, write the best moves, what they are worth, and which is the best.

    prompt       P: <FEN>
    completion    M: <moves> E: <evaluations> B: <best move>

Moves are in UCI, up to five, best first; evaluations are in pawns, one for each move in that order,
**from the point of view of the side to move**. A mate in n moves is worth 1000 - n / 100 pawns,
being mated in n the negative of it: 999.98 is mate in two. A completion begins with the space that
parts it from the prompt: prompt and completion together are a line of text, as RookWorld-LM's, and
its tokens are that line's. Truth comes from an engine, ahead of time (`minigrpo.tools.annotate`).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import chess
import numpy as np

from ..types import Example
from .fen import is_valid_fen

HEAD, KIND = "P: ", "policy"
MATE = 1000.0  # pawns
MAX_SCORED_CHARS = 400
EQUALLY_WON = 10.0  # pawns; beyond them one evaluation is as good as another
MOVE = "[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?[0-9]{1,4}(?:\.[0-9]{1,2})?"
# spaces may be many: RookWorld's lines are padded
FORM = re.compile(rf" *M:((?: +{MOVE})+) +E:((?: +{NUMBER})+) +B: +({MOVE}) *")
MOVES, EVALS, BEST = (
    re.compile(rf"M:((?: +{MOVE})+)"),
    re.compile(rf"E:((?: +{NUMBER})+)"),
    re.compile(rf"B: +({MOVE})"),
)


class Advice(NamedTuple):
    moves: list[str]
    evals: list[float]
    best: str  # "" for none
    well_formed: bool


def write(lines: Sequence[tuple[str, float]]) -> str:
    """The completion for (move, pawns) from best to worst."""
    moves, evals = [move for move, _ in lines], [str(round(value, 2)) for _, value in lines]
    return f" M: {' '.join(moves)} E: {' '.join(evals)} B: {moves[0]}"


def read(text: str) -> Advice:
    """What a text advises, as far as it can be read; each of its three parts counts by itself."""
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
    return frozenset(move.uci() for move in chess.Board(fen).legal_moves)


@lru_cache(maxsize=1 << 12)
def _truth(answer: str) -> tuple[frozenset[str], dict[str, float], str]:
    advice = read(answer)
    return frozenset(advice.moves), dict(zip(advice.moves, advice.evals, strict=True)), advice.best


def check(prompt: str, answer: str) -> chess.Board:
    """The position of a question, if this is one and its truth is possible. Raises ValueError that
    says what is wrong.
    """
    fen = prompt.removeprefix(HEAD)
    if not (prompt.startswith(HEAD) and is_valid_fen(fen)):
        raise ValueError(f"no position: {prompt}")
    advice, legal = read(answer), legal_moves(fen)
    if not advice.well_formed:
        raise ValueError(f"not M: moves E: as many numbers B: a move, but {answer}")
    if wrong := [move for move in (*advice.moves, advice.best) if move not in legal]:
        raise ValueError(f"{wrong[0]} is not legal in {fen}")
    if len(set(advice.moves)) < len(advice.moves):
        raise ValueError(f"a move twice: {' '.join(advice.moves)}")
    return chess.Board(fen)


class Policy:
    """Judges completions part by part against the engine.

    Reward parts, each in [0, 1]: best (the move after B: is the true one), moves (how many of the
    true moves are among the first ones, over the larger number of the two), evals (over the same, 1
    / (1 + error in pawns) of a true move, 0 of another), legal (share of the moves that are legal
    and not there already), format (as many numbers as moves, and a best).
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
        rows = [self._row(example, text) for example, text in zip(examples, texts, strict=True)]
        return dict(
            zip(
                self.parts,
                np.array(rows, dtype=np.float32).reshape(-1, len(self.parts)).T,
                strict=True,
            )
        )

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {
            name: float(values[0]) for name, values in self.score_batch([example], [text]).items()
        }

    def _row(self, example: Example, text: str) -> tuple[float, ...]:
        true_moves, true_evals, true_best = _truth(example.answer)
        advice, legal = read(text), legal_moves(example.prompt.removeprefix(HEAD))
        moves = set(advice.moves)
        most = max(
            len(advice.moves), len(true_moves)
        )  # written twice, a move counts against the writer
        values = dict(zip(advice.moves, advice.evals, strict=False))
        near = sum(
            _nearness(values[move], true_evals[move]) for move in sorted(true_moves & values.keys())
        )
        return (
            float(advice.best == true_best),
            len(moves & true_moves) / most,
            near / most,
            (len(moves & legal) + (advice.best in legal)) / (len(advice.moves) + 1),
            float(advice.well_formed),
        )


def _nearness(a: float, b: float) -> float:
    a, b = (min(max(x, -EQUALLY_WON), EQUALLY_WON) for x in (a, b))
    return 1 / (1 + abs(a - b))

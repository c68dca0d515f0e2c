r"""A chess task of your own in one file: write good moves, their evaluations, and the best move.

    python examples/annotate.py --out annotated.txt --n 2000
    minigrpo train --task examples/best_move.py --data annotated.txt --model scratch --loss nll \
        --learning-rate 2e-3 --out-dir runs/best-move-sft
    minigrpo train --task examples/best_move.py --data annotated.txt --model runs/best-move-sft

A line of the data is a prompt and its completion, in the form of RookWorld-LM:

    P: <FEN> M: <moves> E: <evaluations> B: <best move>

Moves are in UCI notation, up to five, best first. There is one evaluation for each move, in the
same order, in pawns, from the point of view of the side to move; 999.98 is mate in two.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import chess

from minigrpo.fen import position_key
from minigrpo.tasks.data import Row, Rows
from minigrpo.types import Example

PROMPT = "P: "
EQUALLY_WON = 10.0  # pawns; evaluations beyond this count as equal
MAX_SCORED_CHARS = 400
MOVE = "[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?[0-9]{1,4}(?:\.[0-9]{1,2})?"
# whatever is there of the three, in this order
ADVICE = re.compile(
    rf"(?:.*?M:((?: +{MOVE})+))?(?:.*?E:((?: +{NUMBER})+))?(?:.*?B: +({MOVE}))?", re.DOTALL
)


class BestMove(Rows):
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

    def __init__(self, seed: int, data: Sequence[Path], eval_data: Sequence[Path] = ()) -> None:
        super().__init__(seed, data, eval_data, parse_line)

    def read(self, files: Sequence[Path]) -> list[Row]:
        return [parse_line(line) for path in files for line in path.read_text().splitlines()]

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        true_moves, true_evals, true_best = read(example.answer)
        moves, evals, best = read(text)
        board = chess.Board(example.prompt.removeprefix(PROMPT))
        legal = {move.uci() for move in board.legal_moves}
        # divided by the longer list, so that extra and repeated moves lower the score
        longest = max(len(moves), len(true_moves))
        truth = dict(zip(true_moves, true_evals, strict=True))
        written = dict(zip(moves, evals, strict=False))
        close = [closeness(truth[move], written[move]) for move in truth if move in written]
        form = ["M:", *moves, "E:", *evals, "B:", best]
        return {
            "best": float(best == true_best),
            "moves": len(truth.keys() & moves) / longest,
            "evals": sum(close) / longest,
            "legal": (len(legal & set(moves)) + (best in legal)) / (len(moves) + 1),
            "format": float(text.split() == form and len(moves) == len(evals)),
        }


def read(text: str) -> tuple[list[str], list[str], str]:
    """The moves, the evaluations and the best move in any text, as far as they are there."""
    found = ADVICE.match(text[:MAX_SCORED_CHARS])
    assert found  # every part of it may be missing
    moves, evals, best = (part or "" for part in found.groups())
    return moves.split(), evals.split(), best


def closeness(a: str, b: str) -> float:
    """1 for equal evaluations, 1/2 for a pawn of difference."""
    first, second = (min(max(float(x), -EQUALLY_WON), EQUALLY_WON) for x in (a, b))
    return 1 / (1 + abs(first - second))


def parse_line(line: str) -> Row:
    """The completion begins with the space before M: so that a line has the same tokens in one."""
    prompt = line.partition(" M:")[0]
    question = position_key(prompt.removeprefix(PROMPT))
    return Row(question, Example(prompt, line.removeprefix(prompt)))

r"""A chess task of your own in one file: write good moves, their evaluations, and the best move.

    minigrpo train --task examples/best_move.py --data advised.txt --model scratch --loss nll \
        --learning-rate 2e-3 --out-dir runs/best-move-sft
    minigrpo train --task examples/best_move.py --data advised.txt --model runs/best-move-sft

A line of the data is a prompt and its completion:

    P: <FEN> M: <moves> E: <evaluations> B: <best move>

RookWorld-LM's data are published in this form. A chess engine gives the contents of a line if it is
asked for several lines of a position (UCI's option MultiPV).

Moves are in UCI notation, up to five, with the best one first. Each move has an evaluation, in the
same order, in pawns, from the point of view of the side to move; 999.98 is mate in two.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import chess

from minigrpo.fen import position_key
from minigrpo.tasks.base import Rows
from minigrpo.tasks.rows import Row
from minigrpo.types import Example

PROMPT = "P: "
EQUALLY_WON = 10.0  # pawns; evaluations beyond this count as equal
MAX_SCORED_CHARS = 400
MOVE = "[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?[0-9]{1,4}(?:\.[0-9]{1,2})?"
# moves, evaluations and the best move, in this order; any of them may be missing
ADVICE = re.compile(
    rf"(?:.*?M:((?: +{MOVE})+))?(?:.*?E:((?: +{NUMBER})+))?(?:.*?B: +({MOVE}))?", re.DOTALL
)


class BestMove(Rows):
    """Completions are scored against the engine's answer.

    The rewards are in [0, 1]:
        best: The move after B: is the true best move.
        moves: The number of true moves that are listed, divided by the length of the longer list.
        evals: The sum of 1 / (1 + error in pawns) over those moves, divided by the same length.
        legal: The fraction of legal, distinct moves among all written ones; a best move that is
            missing counts as an illegal one.
        format: The text has the form above, with as many evaluations as moves.
    """

    reward_weights: Mapping[str, float] = {
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
        super().__init__(seed, data, eval_data, parse_line)

    def read(self, files: Sequence[Path], argument: str = "data") -> list[Row]:
        """A row for each line, in place of the rows of JSONL files."""
        return [parse_line(line) for path in files for line in path.read_text().splitlines()]

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        truth = Advice.read(example.answer)
        written = Advice.read(text)
        board = chess.Board(example.prompt.removeprefix(PROMPT))
        legal = {move.uci() for move in board.legal_moves}
        num_legal = len(legal & set(written.moves)) + (written.best in legal)
        true_evals = dict(zip(truth.moves, truth.evals, strict=True))
        evals = dict(zip(written.moves, written.evals, strict=False))
        close = [closeness(true_evals[move], evals[move]) for move in true_evals if move in evals]
        # the longer list is the divisor, so that extra and repeated moves lower the score
        longest = max(len(written.moves), len(truth.moves))
        return {
            "best": float(written.best == truth.best),
            "moves": len(true_evals.keys() & written.moves) / longest,
            "evals": sum(close) / longest,
            "legal": num_legal / (len(written.moves) + 1),
            "format": float(written.is_whole(text)),
        }


class Advice(NamedTuple):
    """The contents of a completion; any of them may be empty."""

    moves: list[str]
    evals: list[str]
    best: str

    @classmethod
    def read(cls, text: str) -> "Advice":
        match = ADVICE.match(text[:MAX_SCORED_CHARS])
        assert match  # the pattern matches any text
        moves, evals, best = (part or "" for part in match.groups())
        return cls(moves.split(), evals.split(), best)

    def is_whole(self, text: str) -> bool:
        """Whether a text has only these contents, with an evaluation for each move."""
        words = ["M:", *self.moves, "E:", *self.evals, "B:", self.best]
        return text.split() == words and len(self.moves) == len(self.evals)


def closeness(first: str, second: str) -> float:
    """1 for equal evaluations, 1/2 for a difference of one pawn."""
    return 1 / (1 + abs(clipped(first) - clipped(second)))


def clipped(evaluation: str) -> float:
    return min(max(float(evaluation), -EQUALLY_WON), EQUALLY_WON)


def parse_line(line: str) -> Row:
    """The row of a line. The completion begins with the space before `M:`, as its token does."""
    prompt = line.partition(" M:")[0]
    answer = line.removeprefix(prompt)
    if not Advice.read(answer).is_whole(answer):
        raise ValueError(f"not of the form P: .. M: .. E: .. B: .., in UCI and pawns: {line:.100}")
    question = position_key(prompt.removeprefix(PROMPT))
    return Row(question, Example(prompt, answer))

"""Chess as a world model: given a position and a move, write the position after the move.

    prompt       A: <FEN>+<uci move>+
    completion   <next FEN>+<reward>+<terminated>+<truncated>

With `--task-args history=N` the prompt ends in `<N earlier moves, separated by commas>+`. A
completion ends in `0.001+0+0` while the game goes on, `1.0+1+0` for checkmate, `0.5+1+0` for a
draw, and `0.0+0+1` for an illegal move, which leaves the position as it is. The true answers come
from python-chess (`fen.transition`); the positions come from self-play, or from --data (games and
lines of text).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import chess

from ..fen import is_valid_fen, transition
from ..rewards import similarity
from ..types import Example
from .base import Generated, SourceTask
from .chess_files import ChessFiles, Question
from .self_play import Positions

MAX_SCORED_CHARS = 200  # of a completion; true ones are shorter
# RookWorld's files give an illegal move a reward of -1.0, so a sign may be there
ENDING = re.compile(r"(-?[01]\.[0-9]{1,3})\+([01])\+([01])")
FIELDS = (
    *("board", "side", "castling", "en passant", "halfmove clock", "move number"),
    *("reward", "terminated", "truncated"),
)


class ChessEnv(SourceTask):
    """Prompts from self-play or files; completions are scored part by part against the truth.

    Parts, each in [0, 1]:
        exact_fen: the FEN is the true one.
        similarity: 1 - normalized edit distance between the FEN and the true one.
        valid: the FEN is valid.
        format: the text has four fields that parse.
        reward_value: the reward field is right.
        flags: half a point for each flag that is right.
    """

    # The first two are the objective. The others only break ties: with more weight they would drown
    # the signal as long as no completion is exact.
    parts: Mapping[str, float] = {
        "exact_fen": 1.0,
        "similarity": 1.0,
        "valid": 0.05,
        "format": 0.05,
        "reward_value": 0.05,
        "flags": 0.05,
    }
    speculate = True

    def __init__(
        self, seed: int, data: Sequence[Path] = (), eval_data: Sequence[Path] = (), history: int = 0
    ) -> None:
        """`history`: how many earlier moves the prompts of self-play and games contain."""
        history = int(history)
        if data or eval_data:
            super().__init__(ChessFiles(seed, data, eval_data, parse_line, history))
            return
        train, held_out = (Positions(seed, split, history) for split in ("train", "held-out"))

        def example(number: int, is_held_out: bool) -> Example:
            return held_out.example(number) if is_held_out else train.draw(number)

        super().__init__(Generated(example, "positions of self-play, answers by python-chess"))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        true_fen, *true_ending = example.answer.split("+")
        fen, _, rest = text[:MAX_SCORED_CHARS].partition("+")
        parsed = ENDING.fullmatch(rest)
        ending = parsed.groups() if parsed else ("", "", "")
        right = [a == b for a, b in zip(ending, true_ending, strict=True)]
        exact = fen == true_fen
        return {
            "exact_fen": float(exact),
            "similarity": similarity(fen, true_fen),
            "valid": float(exact or is_valid_fen(fen)),  # the true FEN need not be parsed
            "format": float(parsed is not None),
            "reward_value": float(right[0]),
            "flags": (right[1] + right[2]) / 2,
        }

    def explain(self, example: Example, text: str) -> str:
        """The fields that are wrong."""
        written, true = (re.split("[ +]", x) for x in (text, example.answer))
        if len(written) != len(true):
            return f"{len(written)} fields, not {len(true)}"
        fields = zip(FIELDS, written, true, strict=True)
        return ", ".join(f"{name} {a}, not {b}" for name, a, b in fields if a != b)


def parse_line(text: str) -> list[Question]:
    """The question of a line of RookWorld's, which is kept exactly as it stands.

        A: <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>

    The prefix `A: ` and the history may be missing. An en passant square may be given after every
    double pawn step, or only where a pawn can capture; an illegal move is worth 0.0 or -1.0.

    Raises ValueError for a line that contradicts the rules of chess, or what its position alone
    tells: a draw by repetition. A line of best-move has no question.
    """
    if not text or text.startswith("P:"):
        return []
    fields = text.removeprefix("A: ").split("+")
    if len(fields) not in (6, 7) or not is_valid_fen(fields[0]):
        raise ValueError("not <FEN>+<move>+<history>+<FEN>+<reward>+<terminated>+<truncated>")
    fen, uci, after, ending = fields[0], fields[1], fields[-4], "+".join(fields[-3:])
    true_answer, kind = transition(fen, uci)
    true_fen, _, true_ending = true_answer.partition("+")
    spelled = after in (true_fen, chess.Board(true_fen).fen())
    if not spelled or ending.replace("-1.0+0+1", "0.0+0+1") != true_ending:
        raise ValueError(f"{uci} does not lead to {after}+{ending}")
    answer = f"{after}+{ending}"
    prompt = "A: " + text.removeprefix("A: ").removesuffix(answer)
    return [Question(Example(prompt, answer, kind=kind), (fen, chess.Board(fen).fen()), uci)]

"""Chess as a world model: given a position and a move, write the position after the move.

    prompt       A: <FEN>+<uci move>+
    completion   <next FEN>+<reward>+<terminated>+<truncated>

A completion ends in `0.001+0+0` while the game goes on, `1.0+1+0` for checkmate, `0.5+1+0` for a
draw, and `0.0+0+1` for an illegal move, which leaves the position as it is. The true answers come
from python-chess (`fen.transition`); the positions come from self-play, or from --data (games and
lines of text).
"""

import re
from collections.abc import Mapping
from operator import eq

from ..fen import is_valid_fen
from ..rewards import similarity
from ..types import Example
from .base import SourceTask
from .chess_files import ChessFiles
from .data import Files
from .self_play import SelfPlay

# RookWorld's files give an illegal move a reward of -1.0, so a sign may be there
ENDING = re.compile(r"(-?[01]\.[0-9]{1,3})\+([01])\+([01])")


class ChessEnv(SourceTask):
    """Prompts from self-play or files; completions are scored part by part against the truth."""

    # Each part is in [0, 1]. The first two are the objective. The others only break ties: with more
    # weight they would drown the signal as long as no completion is exact.
    parts: Mapping[str, float] = {
        "exact_fen": 1.0,  # the FEN is the true one
        "similarity": 1.0,  # 1 - normalized edit distance between the FEN and the true one
        "valid": 0.05,  # the FEN is valid
        "format": 0.05,  # the text has four fields that parse
        "reward_value": 0.05,  # the reward field is right
        "flags": 0.05,  # half a point for each flag that is right
    }

    def __init__(self, seed: int, data: Files = (), eval_data: Files = ()) -> None:
        has_files = data or eval_data
        super().__init__(ChessFiles(seed, data, eval_data) if has_files else SelfPlay(seed))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        true_fen, true_reward, *true_flags = example.answer.split("+")
        fen, _, rest = text[:200].partition("+")  # true ones are shorter
        ending = ENDING.fullmatch(rest)
        reward, *flags = ending.groups() if ending else ("", "", "")
        exact = fen == true_fen
        return {
            "exact_fen": exact,
            "similarity": similarity(fen, true_fen),
            "valid": exact or is_valid_fen(fen),  # the true FEN need not be parsed
            "format": ending is not None,
            "reward_value": reward == true_reward,
            "flags": sum(map(eq, flags, true_flags)) / 2,
        }

"""Chess as a world model: given a position and a move, write the position after the move.

    prompt       A: <FEN>+<uci move>+
    completion   <next FEN>+<reward>+<terminated>+<truncated>

With --history the prompt ends in `<earlier moves, separated by commas>+`. A completion ends in
`0.001+0+0` while the game goes on, `1.0+1+0` for checkmate, `0.5+1+0` for a draw, and `0.0+0+1` for
an illegal move, which leaves the position as it is. The true answers come from python-chess
(`transitions`), the positions from seeded self-play (`self_play`).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from ..rewards import is_valid_fen, similarities
from ..types import Example
from .scoring import BatchScored
from .self_play import Positions
from .transitions import PROMPT_PREFIX

MAX_SCORED_CHARS = 200  # a longer completion has no ending, and its FEN is cut off here
# RookWorld's files give an illegal move a reward of -1.0, so a sign may be there
ENDING = re.compile(r"(-?[01]\.[0-9]{1,3})\+([01])\+([01])")


class ChessEnv(BatchScored):
    """The task: prompts from self-play, completions scored part by part against the truth.

    Reward parts, each in [0, 1]:
        exact_fen: the FEN is the true one.
        similarity: 1 - normalized edit distance between the FEN and the true one.
        valid: the FEN is valid.
        format: the text has four fields that parse.
        reward_value: the reward field is right.
        flags: half a point for each flag that is right.
    """

    num_held_out = None  # endless
    prompt_prefixes = (PROMPT_PREFIX,)
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

    def __init__(self, seed: int, history: int = 0) -> None:
        """`history`: how many earlier moves each prompt contains."""
        self._train = Positions(seed, "train", history)
        self._held_out = Positions(seed, "held-out", history)

    def train(self, number: int) -> Example:
        """Return training example `number`; consecutive ones come from different games."""
        return self._train.draw(number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`."""
        return self._held_out.example(number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows, fens, true_fens = [], [], []
        for example, text in zip(examples, texts, strict=True):
            true_fen, true_ending = _truth(example.answer)
            fen, _, rest = text[:MAX_SCORED_CHARS].partition("+")
            ending = _ending(rest) if len(text) <= MAX_SCORED_CHARS else None
            exact = fen == true_fen
            valid = exact or is_valid_fen(fen)  # the true FEN need not be parsed
            if ending:
                flags = ((ending[1] == true_ending[1]) + (ending[2] == true_ending[2])) / 2
                rows.append((exact, valid, True, ending[0] == true_ending[0], flags))
            else:
                rows.append((exact, valid, False, False, 0.0))
            fens.append(fen)
            true_fens.append(true_fen)
        exact_fen, valid, well_formed, reward_value, flags = np.array(rows, dtype=np.float32).T
        return {
            "exact_fen": exact_fen,
            "similarity": similarities(fens, true_fens),
            "valid": valid,
            "format": well_formed,
            "reward_value": reward_value,
            "flags": flags,
        }


@lru_cache(maxsize=1 << 12)
def _truth(answer: str) -> tuple[str, tuple[str, ...]]:
    """The FEN of a true answer, and its three other fields."""
    fen, *ending = answer.split("+")
    return fen, tuple(ending)


@lru_cache(maxsize=1 << 12)
def _ending(text: str) -> tuple[str, ...] | None:
    """Reward, terminated and truncated; None if the text is anything else."""
    found = ENDING.fullmatch(text)
    return found and found.groups()

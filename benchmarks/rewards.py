"""How long scoring takes: `python benchmark.py rewards`.

The completions are samples of the shipped chess model. The plain implementation scores one text
after the other, with python-chess and python-Levenshtein. The benchmark fails if the scorer does
not give the same rewards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import chess
import Levenshtein
import numpy as np
from rich.console import Console

from minigrpo.rewards.scorer import RewardScorer
from minigrpo.tasks.chess_env import ENDING, ChessEnv
from minigrpo.types import Completion, Example

from .measure import Column, Outputs, device_name, show
from .work import Step, Work, WorkFlags

GROUP = 8
COLUMNS: tuple[Column, ...] = (
    ("completions", "completions", "{}"),
    ("one text at a time", "plain", "{:,.1f}"),
    ("distinct texts once", "scorer", "{:,.1f}"),
    ("speedup", "speedup", "{:.1f}"),
)


@dataclass(frozen=True)
class Rewards(Outputs):
    """Milliseconds of scoring by number of completions."""

    sizes: tuple[int, ...] = (64, 1024, 16384)
    """Numbers of completions; multiples of 8."""
    repeats: int = 5
    """Timed runs of each implementation."""

    def run(self, console: Console) -> dict[str, Any]:
        work = Work.of(WorkFlags(natural=True, group_size=GROUP))
        batches = Step(work.config, work).batches
        scorer = RewardScorer(work.task)
        rows = []
        for size in self.sizes:
            examples = [work.task.train(i) for i in range(size // GROUP)]
            texts = list[Sequence[Completion]]()
            for first in range(0, len(examples), 32):
                texts += batches.roll_out(examples[first : first + 32], 0).texts
            expected = plain(examples, texts)
            for name, scores in scorer.score(examples, texts).scores.items():
                assert np.allclose(scores.values, expected[name]), f"{name} differs"
            naive = self._milliseconds(plain, examples, texts)
            ours = self._milliseconds(scorer.score, examples, texts)
            row = {"completions": size, "plain": naive, "scorer": ours, "speedup": naive / ours}
            rows.append(row)
        table = show(console, "Milliseconds of scoring chess positions", rows, COLUMNS)
        return {"device": device_name(work.device), "rows": rows, "tables": [table]}

    def _milliseconds(self, way: Callable[..., object], *batch: object) -> float:
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            way(*batch)
            times.append(1e3 * (time.perf_counter() - start))
        return median(times)


def plain(examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """The values `[P, G]` of each part; python-chess parses and writes every FEN."""
    pairs = zip(examples, texts, strict=True)
    rows = [[plain_score(example, text) for text in group] for example, group in pairs]
    return {
        name: np.array([[s[name] for s in row] for row in rows]) for name in ChessEnv.reward_weights
    }


def plain_score(example: Example, text: str) -> dict[str, float]:
    true_fen, true_ending = example.answer.split("+", 1)
    fen, *rest = text[:200].split("+", 1)
    truth = ENDING.fullmatch(true_ending)
    ending = ENDING.fullmatch(rest[0]) if rest and len(text) <= 200 else None
    assert truth is not None
    valid = False
    if fen.isascii() and len(fen) <= 100:
        try:
            board = chess.Board(fen)
            short = all(len(clock) <= 4 for clock in fen.split(" ")[4:])
            valid = board.is_valid() and short and board.fen(en_passant="fen") == fen
        except ValueError:
            pass
    longest = max(len(fen), len(true_fen))
    return {
        "format": float(ending is not None),
        "valid": float(valid),
        "similarity": 1 - Levenshtein.distance(fen, true_fen) / longest if longest else 1.0,
        "exact_fen": float(fen == true_fen),
        "reward_value": float(ending is not None and ending[1] == truth[1]),
        "flags": sum(ending[i] == truth[i] for i in (2, 3)) / 2 if ending else 0.0,
    }

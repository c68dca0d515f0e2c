"""How long scoring takes: `python benchmark.py rewards`.

The completions are samples of the shipped chess model. The benchmark fails if a way does not give
the same rewards as the plain one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import chess
import Levenshtein
import numpy as np
from rich.console import Console

from minigrpo.rewards import RewardScorer
from minigrpo.task import Task
from minigrpo.tasks.chess_env import ENDING, ChessEnv
from minigrpo.types import Example

from .measure import Outputs, device_name, number, show
from .work import Step, Work, WorkFlags

GROUP = 8
# of examples [P] and texts [P][G]: the values [P, G] of each part
Way = Callable[[Sequence[Example], Sequence[Sequence[str]]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Rewards(Outputs):
    """Milliseconds of scoring by number of completions."""

    sizes: tuple[int, ...] = (64, 1024, 16384)
    """Numbers of completions; multiples of 8."""
    repeats: int = 5
    """Timed runs per way."""

    def run(self, console: Console) -> dict[str, Any]:
        work = Work.of(WorkFlags(natural=True, group_size=GROUP))
        source = Step(work.config, work).source
        rows = []
        for size in self.sizes:
            examples = [work.task.train(i) for i in range(size // GROUP)]
            texts = list[Sequence[str]]()
            for first in range(0, len(examples), 32):
                texts += source.roll_out(examples[first : first + 32], 0).texts
            row: dict[str, Any] = {"completions": size}
            expected = plain(examples, texts)
            for name, way in self._ways(work.task).items():
                times = []
                for _ in range(self.repeats):
                    start = time.perf_counter()
                    parts = way(examples, texts)
                    times.append(1e3 * (time.perf_counter() - start))
                    for part, values in expected.items():
                        assert np.allclose(parts[part], values), f"{name}: {part} differs"
                row[name] = median(times)
            row["speedup"] = row["one text at a time"] / row["distinct texts, in batches"]
            rows.append(row)
        columns = [(name, name, number("{:,.1f}")) for name in rows[0] if name != "completions"]
        title = "Milliseconds of scoring chess positions"
        table = show(console, title, rows, [("completions", "completions", str), *columns])
        return {"device": device_name(work.device), "rows": rows, "tables": [table]}

    def _ways(self, task: Task) -> dict[str, Way]:
        ways: dict[str, Way] = {"one text at a time": plain}
        for workers in (0, 1, 2, 4):
            name = f"in a pool of {workers}" if workers else "distinct texts, in batches"
            scorer = RewardScorer(task, workers=workers)
            ways[name] = lambda *batch, scorer=scorer: scorer.score(*batch).parts
        return ways


def plain(examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """The straightforward implementation: python-chess parses and writes every FEN."""
    pairs = zip(examples, texts, strict=True)
    rows = [[plain_score(example, text) for text in group] for example, group in pairs]
    return {name: np.array([[s[name] for s in row] for row in rows]) for name in ChessEnv.parts}


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

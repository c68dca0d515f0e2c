"""What a completion is worth: FEN validity, similarity, and the scorer that runs a task's parts over a batch.

python-chess holds the interpreter lock, so threads do not make its scoring faster by themselves. What does is scoring each
distinct (prompt, text) once; half-trained policies repeat themselves.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import chess
import Levenshtein
import numpy as np

from .types import Example, RewardTable, Task

MAX_FEN_LENGTH = 100  # python-chess parses a megabyte in 0.2 s; no FEN is longer than this
MAX_CLOCK_DIGITS = 4


def is_valid_fen(text: object) -> bool:
    """Whether `text` is a legal position, written exactly as python-chess writes it with `en_passant="fen"`.

    Stricter than `chess.Board(text).is_valid()`, which fills in missing fields, reads clocks through `int()` and drops a
    castling right whose rook is gone: the text must also round-trip.
    """
    if not isinstance(text, str) or len(text) > MAX_FEN_LENGTH or not text.isascii():
        return False
    fields = text.split(" ")
    if len(fields) != 6 or any(not clock.isdigit() or len(clock) > MAX_CLOCK_DIGITS for clock in fields[4:]):
        return False
    try:
        board = chess.Board(text)
    except ValueError:
        return False
    return board.status() == chess.STATUS_VALID and board.fen(en_passant="fen") == text


def similarity(a: str, b: str) -> float:
    """1 - levenshtein(a, b) / max(len(a), len(b)); two empty texts are equal."""
    longest = max(len(a), len(b))
    return 1.0 - Levenshtein.distance(a, b) / longest if longest else 1.0


class RewardScorer:
    """Runs a task's reward parts over a batch of texts, in a pool of threads, each distinct (prompt, text) once."""

    def __init__(self, task: Task, *, weights: Mapping[str, float] | None = None, workers: int = 0) -> None:
        """`weights` defaults to the task's own; `workers` = 0 scores serially. Raises ValueError for an unknown part."""
        self.task = task
        self.weights = dict(weights or task.parts)
        unknown = set(self.weights) - set(task.parts)
        if unknown:
            raise ValueError(f"--reward-weights: no part {', '.join(sorted(unknown))}; allowed: {', '.join(task.parts)}")
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="reward") if workers else None
        self.workers = workers

    def score(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> RewardTable:
        """Score P x G texts: `examples` holds P questions, `texts` G completions of each."""
        places: dict[tuple[str, str], int] = {}
        jobs: list[tuple[Example, str]] = []
        index = np.empty((len(texts), len(texts[0])), dtype=np.int64)
        for p, (example, group) in enumerate(zip(examples, texts, strict=True)):
            for g, text in enumerate(group):
                index[p, g] = places.setdefault((example.prompt, text), len(jobs))
                if index[p, g] == len(jobs):
                    jobs.append((example, text))
        if self.pool is None:
            scores = self._score(jobs)
        else:
            size = -(-len(jobs) // self.workers)
            chunks = [jobs[i : i + size] for i in range(0, len(jobs), size)]
            scores = [score for chunk in self.pool.map(self._score, chunks) for score in chunk]
        parts = {name: np.array([score[name] for score in scores], dtype=np.float32)[index] for name in self.task.parts}
        total = np.zeros(index.shape, dtype=np.float32)
        for name, weight in self.weights.items():
            total += np.float32(weight) * parts[name]
        return RewardTable(total, parts)

    def _score(self, jobs: Sequence[tuple[Example, str]]) -> list[Mapping[str, float]]:
        return [self.task.score(example, text) for example, text in jobs]

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)

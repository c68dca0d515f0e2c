"""Text similarity, and the scorer that runs all reward parts.

The tasks' own scores are in tasks/, a user's functions in runtime/reward_functions.py. How calls
are cut, limited and checked is in runtime/reward_calls.py.

Scoring is cheap because each distinct (example, text) is scored once, except by functions of whole
groups, and malformed texts are rejected before they are parsed. Threads do not make it faster,
because python-chess holds the interpreter lock (GIL). They let scoring overlap with work on the
device, let rewards wait side by side (for a network, say), and keep one that hangs from stopping
the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein  # unlike the package Levenshtein, a batch per call

from .runtime.measures import success_of
from .runtime.pending_rewards import PendingRewards as PendingRewards
from .runtime.pool import WorkerPool
from .runtime.reward_calls import (
    BATCHED,
    GROUPED,
    TOKENS,
    RewardSource,
    check_texts,
    describe_failure,
    distinct_pairs,
)
from .runtime.reward_functions import RewardFunction as RewardFunction
from .runtime.reward_functions import check_functions, check_number, check_time_limit
from .runtime.reward_functions import reward as reward
from .runtime.reward_weights import narrow, total_so_far
from .runtime.task_sources import check_is_object, task_sources
from .runtime.token_rewards import TokenBatch as TokenBatch
from .runtime.token_rewards import TokenScoring
from .tasks.fen import is_valid_fen as is_valid_fen
from .types import Completions, Example, RewardTable, Task


def similarity(a: str, b: str) -> float:
    """Return 1 - levenshtein(a, b) / max(len(a), len(b)), in [0, 1]; 1 for two empty texts."""
    return Levenshtein.normalized_similarity(a, b)


def similarities(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
    """Return `similarity` of each pair, `[n]` float64, computed in one call."""
    scores: np.ndarray = process.cpdist(
        a, b, scorer=Levenshtein.normalized_similarity, dtype=np.float64
    )
    return scores


class RewardScorer:
    """Runs the reward parts over a batch of texts, each distinct (example, text) once."""

    def __init__(
        self,
        task: Task,
        *,
        weights: Mapping[str, float] | None = None,
        functions: Sequence[RewardFunction] = (),
        workers: int = 0,
        timeout_s: float = 10.0,
        warn: Callable[[str], object] = lambda text: None,
        token_scoring: TokenScoring | None = None,
    ) -> None:
        """
        Args:
            weights: of each part in the total; parts that are not named weigh 0. None or empty:
                the weights of the task and of the functions.
            functions: reward parts beside the task's.
            workers: threads; 0 scores in the calling thread, except for calls that might hang.
            timeout_s: seconds per completion, for functions without a limit of their own and for a
                task without `score_batch`.
            warn: called with the first failure of each reward source.
            token_scoring: for parts that look at tokens; None if there are none.

        Raises:
            ValueError: a weight of an unknown part, two parts of one name or two that are the
                success, a time limit that is not above 0, a number of workers that cannot be, a
                class as the task, or a function without the decorator `reward`.
        """
        check_is_object(task)
        check_time_limit("timeout_s", timeout_s)
        check_functions(functions, task.parts)
        allowed = {**task.parts, **{function.name: function.weight for function in functions}}
        self.weights = dict(weights or allowed)
        if unknown := set(self.weights) - set(allowed):
            raise ValueError(
                f"--reward-weights: no part {', '.join(sorted(unknown))}; allowed: "
                f"{', '.join(allowed)}"
            )
        for name, weight in self.weights.items():
            check_number(f"--reward-weights: {name}", weight)
        self.task = task
        # the part that says which completions are right
        self.success = next((f.name for f in functions if f.success), success_of(task))
        found = [*task_sources(task, timeout_s), *(f.source(timeout_s) for f in functions)]
        self.sources = [source for source in found if source.kind != TOKENS]
        self.token_sources = [source for source in found if source.kind == TOKENS]
        self.token_scoring = token_scoring
        self.pool, self.workers, self.warn = WorkerPool(workers, "reward"), workers, warn
        self._warned: set[tuple[str, bool]] = set()

    def score(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> RewardTable:
        """Score `texts`, `[P][G]`: G completions of each of the P examples.

        Raises ValueError for another shape, anything but text, or a part that looks at tokens.
        """
        if self.token_sources:
            names = [name for source in self.token_sources for name in source.names]
            raise ValueError(
                f"{', '.join(names)}: cannot be scored by the text, see evaluate.grade"
            )
        return self.submit(examples, texts).result()

    def with_token_parts(
        self,
        table: RewardTable,
        examples: Sequence[Example],
        texts: Sequence[Sequence[str]],
        completions: Completions,
        temperature: float,
    ) -> RewardTable:
        """A table with the parts that look at tokens too, and with the total of all parts.

        It works on the device, in the calling thread. `temperature` is that of the samples.
        Raises ConfigError if such a part fails.
        """
        if not self.token_sources:
            return table
        if self.token_scoring is None:
            raise ValueError("parts that look at tokens need RewardScorer(token_scoring=...)")
        found = self.token_scoring.parts(
            self.token_sources, examples, texts, completions, temperature
        )
        parts = {**table.parts, **{name: narrow(values) for name, values in found.items()}}
        return replace(
            table, total=total_so_far(parts, self.weights, table.total.shape), parts=parts
        )

    def submit(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> PendingRewards:
        """Start scoring; with workers, return before it is done."""
        check_texts(examples, texts)
        asked, distinct, index = distinct_pairs(examples, texts)
        pending = PendingRewards(self.sources, self.weights, self.pool, self.warn_once, index)
        for source in self.sources:
            group, size = index.shape[1], len(distinct) if source.of_distinct else index.size
            for part in source.pieces(size, self.workers, group):
                if source.kind == GROUPED:
                    place = part.start // group
                    args: tuple[Any, Any] = source.asked(examples[place]), list(texts[place])
                elif source.kind == BATCHED:
                    args = [source.asked(one) for one in asked[part]], distinct[part]
                else:
                    args = source.asked(asked[part.start]), distinct[part.start]
                job = self.pool.submit(source.answer, *args, needs_thread=not source.trusted)
                pending.calls.append((source, part, job))
        return pending

    def warn_once(self, source: RewardSource, error: Exception) -> None:
        """Warn of the first failure of a source, and the first time that all threads hang.

        A line per failure would flood the log; the metrics rewards/<part>/failures count them all.
        """
        name, what = ", ".join(source.names), describe_failure(error)
        key = (name, what.startswith("all threads hang"))
        if key not in self._warned:
            self._warned.add(key)
            self.warn(
                f"reward {name}: {what}; such completions get {source.floor}, "
                "rewards/<part>/failures counts them"
            )

    def close(self) -> None:
        """Stop the idle threads."""
        self.pool.close()

"""What a completion is worth: similarity, reward functions, and the scorer that runs them over a
batch.

python-chess holds the interpreter lock, so threads do not make its scoring faster by themselves.
What does: scoring each distinct (prompt, text) once, rejecting cheaply, and not parsing what a memo
knows. The pool is there for overlap with the device, for rewards that wait, and because a function
that hangs must not stop a run.
"""

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein  # what the package Levenshtein is made of

from .runtime.pool import Job, WorkerPool
from .tasks.fen import is_valid_fen as is_valid_fen
from .types import Example, RewardTable, Task

LONGEST_BATCH = (
    300.0  # seconds; other processes wait for these scores, and give up after --pg-timeout
)


def similarity(a: str, b: str) -> float:
    """1 - levenshtein(a, b) / max(len(a), len(b)); two empty texts are equal."""
    return Levenshtein.normalized_similarity(a, b)


def similarities(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
    """`similarity` of each pair, `[n]` float64, in one call."""
    scores: np.ndarray = process.cpdist(
        a, b, scorer=Levenshtein.normalized_similarity, dtype=np.float64
    )
    return scores


# --- rewards of one's own -------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFunction:
    """A reward part that is not the task's: `function(example, text) -> float`, or, batched, of
    lists.
    """

    function: Callable[..., Any]
    name: str
    weight: float = 1.0
    timeout_s: float | None = None  # a completion; None: the scorer's
    floor: float = 0.0  # what a completion gets if the function fails on it
    batched: bool = (
        False  # function(examples, texts) -> as many floats; which texts come together is not fixed
    )

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def reward(
    *,
    weight: float = 1.0,
    timeout_s: float | None = None,
    floor: float = 0.0,
    batched: bool = False,
) -> Callable[[Callable[..., Any]], RewardFunction]:
    """Decorator: make a function a reward part under its own name.

        @reward(weight=0.2)
        def brevity(example, text):
            return 1 / (1 + len(text))

    `--rewards FILE.py` adds a file's decorated functions to the task's parts; `reward_weights` in
    TOML or --reward-weights beat `weight`. A batched function gets lists, for a reward model, say;
    which texts come together depends on the number of processes and on --rollout-batch-size, so the
    value of a text should depend on that text alone. A call that raises, takes longer than
    `timeout_s` or returns anything but a finite number is worth `floor`.
    """

    def decorate(function: Callable[..., Any]) -> RewardFunction:
        return RewardFunction(function, function.__name__, weight, timeout_s, floor, batched)

    return decorate


@dataclass(frozen=True)
class RewardSource:
    """Whatever scores: a task's own parts, or one function."""

    names: Sequence[str]
    call: Callable[
        ..., Any
    ]  # batched: (examples, texts) -> {name: values}; else (example, text) -> {name: value}
    batched: bool
    timeout_s: float | None  # None: trusted, so it may run in large pieces and is waited for
    floor: float = 0.0


class _Wrong(Exception):
    """What a reward returned that is not a reward."""


def _numbers(values: Any, judge: RewardSource, size: int) -> np.ndarray:
    """A judge's answer for `size` completions as `[parts, size]`; raises _Wrong if it is not all
    finite numbers.
    """
    table = np.empty((len(judge.names), size), dtype=np.float32)
    for row, name in zip(table, judge.names, strict=True):
        try:
            column = values[name] if judge.batched else [values[name]]
        except Exception:
            raise _Wrong(f"returned {_short(values)}, without {name}") from None
        if isinstance(column, str) or not hasattr(column, "__len__") or len(column) != size:
            raise _Wrong(f"returned {_short(column)}, not {size} numbers")
        plain = isinstance(column, np.ndarray) and column.dtype.kind in "fiub"
        for value in () if plain else column:
            if not isinstance(value, numbers.Real | np.bool_):
                raise _Wrong(f"returned {_short(value)}, not a finite number")
        row[:] = column
        if not np.isfinite(row).all():
            raise _Wrong(f"returned {_short(row[~np.isfinite(row)][0])}, not a finite number")
    return table


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


@dataclass
class PendingRewards:
    """Rewards that are being computed; `result` waits for them."""

    scorer: "RewardScorer"
    index: np.ndarray  # [P, G] into the distinct (prompt, text)
    tasks: list[tuple[RewardSource, slice, Job]] = field(default_factory=list)
    table: RewardTable | None = None  # once it is known

    def result(self) -> RewardTable:
        """The table; a completion that a judge failed on has that judge's floor, and is counted."""
        if self.table is None:
            self.table = self._wait()
        return self.table

    def _wait(self) -> RewardTable:
        size = int(self.index.max()) + 1
        columns = {
            name: np.zeros(size, dtype=np.float32)
            for judge in self.scorer.judges
            for name in judge.names
        }
        failed = {name: np.zeros(size, dtype=np.int64) for name in self.scorer.can_fail}
        for judge, part, job in self.tasks:
            count = part.stop - part.start
            try:
                limit = judge.timeout_s
                if limit is not None and judge.batched:
                    limit = max(limit, min(limit * count, LONGEST_BATCH))
                answer = self.scorer.pool.wait(job, limit)
                table = _numbers(answer, judge, count)
            except Exception as error:
                if judge.timeout_s is None:
                    raise
                table = np.full((len(judge.names), count), judge.floor, dtype=np.float32)
                self.scorer.complain(judge, error)
                for name in judge.names:
                    failed[name][part] = 1
            for name, values in zip(judge.names, table, strict=True):
                columns[name][part] = values
        parts = {name: column[self.index] for name, column in columns.items()}
        total = np.zeros(self.index.shape, dtype=np.float32)
        for name, weight in self.scorer.weights.items():
            total += np.float32(weight) * parts[name]
        return RewardTable(
            total, parts, {name: int(hits[self.index].sum()) for name, hits in failed.items()}
        )


class RewardScorer:
    """Runs reward parts over a batch of texts, in a pool of threads, each distinct (prompt, text)
    once.
    """

    def __init__(
        self,
        task: Task,
        *,
        weights: Mapping[str, float] | None = None,
        functions: Sequence[RewardFunction] = (),
        workers: int = 0,
        timeout_s: float = 10.0,
        warn: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Raises ValueError for a weight of a part that there is not.

        Args:
            weights: of each part in the total, parts left out weigh 0; default: the task's and the
                functions' own.
            functions: more parts than the task has.
            workers: threads; 0 scores serially (what could hang still gets a thread of its own).
            timeout_s: for a task or function that does not vouch for itself, a completion.
        """
        own = {function.name: function.weight for function in functions}
        if twice := set(own) & set(task.parts):
            raise ValueError(
                f"--rewards: {', '.join(sorted(twice))} is the name of a part that the task has "
                "already"
            )
        allowed = {**task.parts, **own}
        self.weights = dict(weights or allowed)
        if unknown := set(self.weights) - set(allowed):
            raise ValueError(
                f"--reward-weights: no part {', '.join(sorted(unknown))}; allowed: "
                f"{', '.join(allowed)}"
            )
        batch = _batch_of(task)
        self.judges = [
            RewardSource(
                list(task.parts),
                batch or task.score,
                batch is not None,
                None if batch else timeout_s,
            )
        ]
        for function in functions:
            names, limit = [function.name], function.timeout_s or timeout_s
            self.judges.append(
                RewardSource(names, _named(function), function.batched, limit, function.floor)
            )
        self.can_fail = [
            name for judge in self.judges if judge.timeout_s is not None for name in judge.names
        ]
        self.pool, self.workers, self.warn = WorkerPool(workers, "reward"), workers, warn
        self.warned: set[str] = set()

    def score(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> RewardTable:
        """Score P x G texts: `examples` holds P questions, `texts` G completions of each."""
        return self.submit(examples, texts).result()

    def submit(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> PendingRewards:
        """Begin to score; with workers this returns at once."""
        places: dict[str, dict[str, int]] = {}  # of each prompt: its texts
        asked: list[Example] = []
        distinct: list[str] = []
        index: list[list[int]] = []
        for example, group in zip(examples, texts, strict=True):
            of_prompt, row = places.setdefault(example.prompt, {}), []
            for text in group:
                if (place := of_prompt.get(text)) is None:
                    of_prompt[text] = place = len(distinct)
                    asked.append(example)
                    distinct.append(text)
                row.append(place)
            index.append(row)
        pending = PendingRewards(self, np.array(index))
        for judge in self.judges:
            for part in self._pieces(judge, len(distinct)):
                some = (
                    (asked[part], distinct[part])
                    if judge.batched
                    else (asked[part.start], distinct[part.start])
                )
                thread = judge.timeout_s is not None
                pending.tasks.append(
                    (judge, part, self.pool.submit(judge.call, *some, needs_thread=thread))
                )
        return pending

    def _pieces(self, judge: RewardSource, size: int) -> Iterator[slice]:
        if not judge.batched:
            length = 1
        elif judge.timeout_s is None:
            length = -(-size // max(1, self.workers))
        else:
            length = size  # a batched function of one's own may look at the whole batch
        return (slice(start, min(start + length, size)) for start in range(0, size, length))

    def complain(self, judge: RewardSource, error: Exception) -> None:
        """Say once of each judge what went wrong first; the counters say how often."""
        name = ", ".join(judge.names)
        what = (
            str(error)
            if isinstance(error, _Wrong | TimeoutError)
            else f"{type(error).__name__}: {str(error)[:200]}"
        )
        kind = f"{name}, {'hangs' if what.startswith('all threads') else 'fails'}"
        if kind not in self.warned:
            self.warned.add(kind)
            self.warn(
                f"reward {name}: {what}; such completions get {judge.floor}, "
                "rewards/<part>/failures counts them"
            )

    def close(self) -> None:
        self.pool.close()


def _batch_of(task: Task) -> Callable[..., Any] | None:
    """The task's `score_batch`, unless it is inherited and `score`, which it would have to follow,
    is not.
    """

    def depth(name: str) -> int:
        kinds = type(task).__mro__
        return next((i for i, kind in enumerate(kinds) if name in vars(kind)), len(kinds))

    return getattr(task, "score_batch", None) if depth("score_batch") <= depth("score") else None


def _named(function: RewardFunction) -> Callable[..., dict[str, Any]]:
    return lambda *args: {function.name: function(*args)}

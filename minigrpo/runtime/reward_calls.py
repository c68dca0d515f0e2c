"""How reward functions are called: how many texts per call, time limits, and accepted results.

A task with `score_batch` is trusted: its calls have no time limit, and an error in one ends the
run. Everything else (a user's reward function, a task that has only `score`) may hang, raise or
return something that is not a number. Then the call has failed, and its completions get `floor`.
The threads are in pool.py.
"""

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..types import Example, Task

# longest batched call, because the other processes wait for its scores until --pg-timeout
LONGEST_BATCH_S = 300.0


class BadRewardError(Exception):
    """A reward function returned something other than finite numbers."""


@dataclass(frozen=True)
class RewardSource:
    """A callable that scores completions, with the limits on its calls."""

    names: Sequence[str]  # the reward parts that it returns
    # (examples, texts) -> {name: values} if batched, else (example, text) -> {name: value}
    call: Callable[..., Any]
    batched: bool
    timeout_s: float | None  # seconds per completion; None: trusted
    floor: float = 0.0  # the score of a completion whose call failed

    @property
    def trusted(self) -> bool:
        """Whether its calls have no time limit, and an error in one ends the run."""
        return self.timeout_s is None

    def pieces(self, size: int, workers: int) -> Iterator[slice]:
        """Split `size` completions into one slice per call.

        Trusted batches are divided among the workers. A user's batched function gets all
        completions in one call, like a reward model that batches them itself.
        """
        if not self.batched:
            length = 1
        elif self.trusted:
            length = -(-size // max(1, workers))
        else:
            length = size
        return (slice(start, min(start + length, size)) for start in range(0, size, length))

    def time_limit(self, size: int) -> float | None:
        """Seconds for a call with `size` completions: `timeout_s` each, capped for a batch."""
        if self.timeout_s is None or not self.batched:
            return self.timeout_s
        return max(self.timeout_s, min(self.timeout_s * size, LONGEST_BATCH_S))

    def check(self, answer: Any, size: int) -> np.ndarray:
        """Return the answer for `size` completions as `[len(names), size]` float32.

        Raises:
            BadRewardError: a part is missing, its count is not `size`, or a value is not a finite
                number.
        """
        table = np.empty((len(self.names), size), dtype=np.float32)
        for row, name in zip(table, self.names, strict=True):
            try:
                column = answer[name] if self.batched else [answer[name]]
            except Exception:
                raise BadRewardError(f"returned {_short(answer)}, without {name}") from None
            if isinstance(column, str) or not hasattr(column, "__len__") or len(column) != size:
                raise BadRewardError(f"returned {_short(column)}, not {size} numbers")
            is_numeric_array = isinstance(column, np.ndarray) and column.dtype.kind in "fiub"
            for value in () if is_numeric_array else column:
                if not isinstance(value, numbers.Real | np.bool_):
                    raise BadRewardError(f"returned {_short(value)}, not a finite number")
            row[:] = column
            if not np.isfinite(row).all():
                bad = row[~np.isfinite(row)][0]
                raise BadRewardError(f"returned {_short(bad)}, not a finite number")
        return table


def task_source(task: Task, timeout_s: float) -> RewardSource:
    """Use `score_batch` if the task has one that matches its `score`; else `score`, untrusted.

    A subclass that overrides only `score` inherits a `score_batch` that does not call it. Using
    that would silently ignore the subclass's scores.
    """

    def depth(name: str) -> int:
        classes = type(task).__mro__
        return next((i for i, kind in enumerate(classes) if name in vars(kind)), len(classes))

    score_batch = getattr(task, "score_batch", None)
    if score_batch is not None and depth("score_batch") <= depth("score"):
        return RewardSource(list(task.parts), score_batch, batched=True, timeout_s=None)
    return RewardSource(list(task.parts), task.score, batched=False, timeout_s=timeout_s)


def distinct_pairs(
    examples: Sequence[Example], texts: Sequence[Sequence[str]]
) -> tuple[list[Example], list[str], np.ndarray]:
    """The distinct (prompt, text) pairs of `texts`, `[P][G]`, in order of first occurrence.

    Returns:
        The examples and the texts of the pairs; and `[P, G]` int, the pair of each completion.
    """
    places: dict[str, dict[str, int]] = {}  # prompt -> text -> pair
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
    return asked, distinct, np.array(index)


def describe_failure(error: Exception) -> str:
    """What went wrong in a call, short enough for one line of a warning."""
    if isinstance(error, BadRewardError | TimeoutError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:200]}"


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"

"""How reward functions are called: how many texts per call, time limits, and accepted results.

A task with `score_batch` is trusted: its calls have no time limit, and an error in one ends the
run. Everything else (a user's reward function, a task that has only `score`) may hang, raise or
return something that is not a number. Then the call has failed, and its completions get `floor`.
The threads are in pool.py.
"""

import copy
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..types import Example, Task
from .flags import ConfigError
from .loss_arguments import FLOAT32_UP_TO
from .text import one_line, short

# longest batched call, because the other processes wait for its scores until --pg-timeout
LONGEST_BATCH_S = 300.0
# largest score or weight; the variance of larger ones overflows float32
LARGEST = 1e12


class BadRewardError(ConfigError):
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

    def answer(self, *args: Any) -> Any:
        """Call the function, and copy what it returns: it may reuse one object for each call."""
        return copied(self.call(*args))

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
        """Return the answer for `size` completions as `[len(names), size]` float64.

        Raises:
            BadRewardError: a part is missing, its count is not `size`, or a value is not a number
                from -LARGEST to LARGEST.
        """
        table = np.empty((len(self.names), size), dtype=np.float64)
        for row, name in zip(table, self.names, strict=True):
            try:
                column = answer[name] if self.batched else [answer[name]]
            except Exception:
                raise BadRewardError(f"returned {short(answer)}, without {name}") from None
            row[:] = _numbers(column, size)
            if (bad := row[~(np.abs(row) <= LARGEST)]).size:
                raise BadRewardError(f"returned {short(bad[0])}, not a finite number up to 1e12")
        return table


def _numbers(column: Any, size: int) -> np.ndarray:
    """Return a part's scores as `[size]` float64. Raises BadRewardError for anything else."""
    try:
        # a dict or a set would give its keys, in whatever order; a masked array hides its values
        unordered = isinstance(column, str | bytes | Mapping | Set | np.ma.MaskedArray)
        fits = not unordered and getattr(column, "shape", (len(column),)) == (size,)
        if fits and isinstance(column, np.ndarray) and column.dtype.kind in "fiub":
            return column.astype(np.float64)
        values = list(column) if fits else []
    except Exception:
        fits, values = False, []
    if not fits or len(values) != size:
        raise BadRewardError(f"returned {short(column)}, not {size} numbers")
    scores = np.empty(size)
    for i, value in enumerate(values):
        if not isinstance(value, numbers.Real | np.bool_):
            raise BadRewardError(f"returned {short(value)}, not a finite number")
        try:
            scores[i] = float(value)
        except Exception:  # a whole number or a fraction that is too large, or a user's own type
            raise BadRewardError(
                f"returned {short(value)}, not a finite number up to 1e12"
            ) from None
    return scores


def copied(answer: Any) -> Any:
    """A copy of what can be changed in place: dicts, lists, arrays and tensors."""
    if type(answer) is dict:
        return {name: copied(value) for name, value in answer.items()}
    if type(answer) is list:
        return list(answer)
    if isinstance(answer, np.ndarray | torch.Tensor):
        return copy.copy(answer) if isinstance(answer, np.ndarray) else answer.clone()
    return answer


def narrow(scores: np.ndarray) -> np.ndarray:
    """Scores in float32, unless one is so large that float32 would merge different ones."""
    return scores.astype(np.float32) if (np.abs(scores) <= FLOAT32_UP_TO).all() else scores


def weighted_sum(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """The total of reward parts `[P, G]`, in float32 if all weighted parts are small enough."""
    terms = [np.float64(weight) * parts[name] for name, weight in weights.items()]
    if not all((np.abs(term) <= FLOAT32_UP_TO).all() for term in terms):
        return np.stack(terms).sum(axis=0)
    total = np.zeros_like(terms[0], dtype=np.float32)
    for name, weight in weights.items():
        total += np.float32(weight) * parts[name].astype(np.float32)
    return total


def check_texts(examples: Any, texts: Any) -> None:
    """Raise ValueError unless there are as many groups as examples, of as many texts each.

    A group that is a single text would be scored character by character.
    """
    for name, value in (("examples", examples), ("texts", texts)):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {short(value)}")
    if not texts or len(examples) != len(texts):
        raise ValueError(
            "texts must have a list of completions for each example, and at least one, "
            f"got {len(texts)} for {len(examples)} examples"
        )
    for group in texts:
        if not isinstance(group, list | tuple):
            raise ValueError(f"texts must be lists of texts, one per example, got {short(group)}")
        if len(group) != len(texts[0]) or not group:
            raise ValueError(
                "each example must have the same number of texts, at least one, "
                f"got {len(texts[0])} and {len(group)}"
            )
        if wrong := [text for text in group if not isinstance(text, str)]:
            raise ValueError(f"a completion must be text, got {short(wrong[0])}")


def task_source(task: Task, timeout_s: float) -> RewardSource:
    """Use `score_batch` if the task has one that matches its `score`; else `score`, untrusted.

    A subclass that overrides only `score` inherits a `score_batch` that does not call it. Using
    that would silently ignore the subclass's scores.
    """

    users = getattr(task, "users", task)  # what tasks/own.py wraps

    def depth(name: str) -> int:
        classes = type(users).__mro__
        return next((i for i, kind in enumerate(classes) if name in vars(kind)), len(classes))

    score_batch = getattr(task, "score_batch", None)
    if score_batch is not None and depth("score_batch") <= depth("score"):
        return RewardSource(list(task.parts), score_batch, batched=True, timeout_s=None)
    return RewardSource(list(task.parts), task.score, batched=False, timeout_s=timeout_s)


def distinct_pairs(
    examples: Sequence[Example], texts: Sequence[Sequence[str]]
) -> tuple[list[Example], list[str], np.ndarray]:
    """The distinct (example, text) pairs of `texts`, `[P][G]`, in order of first occurrence.

    Two examples may have the same prompt and different answers, so the prompt does not identify a
    question.

    Returns:
        The examples and the texts of the pairs; and `[P, G]` int, the pair of each completion.
    """
    places: dict[Example | int, dict[str, int]] = {}  # example -> text -> pair
    asked: list[Example] = []
    distinct: list[str] = []
    index: list[list[int]] = []
    for example, group in zip(examples, texts, strict=True):
        question = getattr(example, "original", example)  # a user's code gets its own object
        of_example, row = places.setdefault(_identity(question), {}), []
        for text in group:
            if (place := of_example.get(text)) is None:
                of_example[text] = place = len(distinct)
                asked.append(question)
                distinct.append(text)
            row.append(place)
        index.append(row)
    return asked, distinct, np.array(index)


def _identity(example: Example) -> Example | int:
    """What tells one question from another: all fields of an `Example`.

    A subclass may have fields that `==` does not compare, and a field may be impossible to hash.
    Such an object equals only itself.
    """
    try:
        hash(example)
    except TypeError:
        return id(example)
    return example if type(example) is Example else id(example)


def describe_failure(error: Exception) -> str:
    """What went wrong in a call, short enough for one line of a warning."""
    own = isinstance(error, ConfigError | TimeoutError)
    return one_line(error).removeprefix(f"{type(error).__name__}: ") if own else one_line(error)

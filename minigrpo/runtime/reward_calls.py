"""How reward functions are called: how many texts per call, time limits, and accepted results.

A task with `score_batch` is trusted: its calls have no time limit, and an error in one ends the
run. Everything else (a user's reward function, a task that has only `score`) may hang, raise or
return something that is not a number. Then the call has failed, and its completions get `floor`.
The threads are in pool.py.
"""

import copy
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..types import Example
from .flags import ConfigError
from .text import one_line, short

# longest batched call, because the other processes wait for its scores until --pg-timeout
LONGEST_BATCH_S = 300.0
# largest score or weight; the variance of larger ones overflows float32
LARGEST = 1e12


# what a source is called with
EACH = "each"  # (example, text) -> {name: value}
BATCHED = "batched"  # (examples, texts) -> {name: values}, each distinct pair once
GROUPED = "grouped"  # (example, texts) -> {name: values}, all completions of a prompt
TOKENS = "tokens"  # (TokenBatch) -> {name: values [P, G]}, see token_rewards.py


PARTLY_NAN = (
    "returned NaN for some completions of a prompt and not for others; NaN says that a part does "
    "not concern an example, whatever the text"
)


class BadRewardError(ConfigError):
    """A reward function returned something other than finite numbers."""


@dataclass(frozen=True)
class RewardSource:
    """A callable that scores completions, with the limits on its calls."""

    names: Sequence[str]  # the reward parts that it returns
    call: Callable[..., Any]
    kind: str  # EACH, BATCHED, GROUPED or TOKENS
    timeout_s: float | None  # seconds per completion; None: trusted
    floor: float = 0.0  # the score of a completion whose call failed
    may_be_nan: bool = False  # NaN says that a part does not concern the example
    is_function: bool = False  # a function of --rewards; otherwise it belongs to the task

    @property
    def trusted(self) -> bool:
        """Whether its calls have no time limit, and an error in one ends the run."""
        return self.timeout_s is None

    def answer(self, *args: Any) -> Any:
        """Call the function, and copy what it returns: it may reuse one object for each call."""
        return copied(self.call(*args))

    def asked(self, example: Example) -> Example:
        """The example that a call gets: the task's own object, or a copy of it for a function.

        A function that takes used numbers out of a list in `example.fields` would change what the
        task compares the next completion with.
        """
        example = users_own(example)
        if not self.is_function or type(example) is not Example:
            return example
        messages, fields = (_own(value) for value in (example.messages, example.fields))
        return replace(example, messages=messages, fields=fields)

    @property
    def of_distinct(self) -> bool:
        """Whether it scores distinct (example, text) pairs, rather than all completions."""
        return self.kind in (EACH, BATCHED)

    def pieces(self, size: int, workers: int, group_size: int = 1) -> Iterator[slice]:
        """Split `size` pairs, or completions in groups of `group_size`, into one slice per call.

        Trusted batches are divided among the workers. A user's batched function gets all
        completions in one call, like a reward model that batches them itself.
        """
        if self.kind == EACH:
            length = 1
        elif self.kind == GROUPED:
            length = group_size
        elif self.trusted:
            length = -(-size // max(1, workers))
        else:
            length = size
        return (slice(start, min(start + length, size)) for start in range(0, size, length))

    def of_one(self, example: Example, text: str) -> np.ndarray:
        """The checked scores of one text, `[len(names), 1]`, for EACH and BATCHED."""
        pair: tuple[Any, Any] = example, text
        if self.kind == BATCHED:
            pair = [example], [text]
        return self.check(self.answer(*pair), 1)

    def time_limit(self, size: int) -> float | None:
        """Seconds for a call with `size` completions: `timeout_s` each, capped for a batch."""
        if self.timeout_s is None or self.kind == EACH:
            return self.timeout_s
        return max(self.timeout_s, min(self.timeout_s * size, LONGEST_BATCH_S))

    def check(self, answer: Any, size: int) -> np.ndarray:
        """Return the answer for `size` completions as `[len(names), size]` float64.

        Raises:
            BadRewardError: a part is missing, its count is not `size`, or a value is not a number
                from -LARGEST to LARGEST, nor NaN where that is allowed.
        """
        table = np.empty((len(self.names), size), dtype=np.float64)
        for row, name in zip(table, self.names, strict=True):
            try:
                column = [answer[name]] if self.kind == EACH else answer[name]
            except Exception:
                raise BadRewardError(f"returned {short(answer)}, without {name}") from None
            row[:] = _numbers(column, size)
            allowed = (np.abs(row) <= LARGEST) | (np.isnan(row) & self.may_be_nan)
            if (bad := row[~allowed]).size:
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


def _own(value: Any) -> Any:
    """Plain data with dicts and lists of its own, and all other objects as they are."""
    if type(value) is dict:
        return {name: _own(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own(inner) for inner in value)
    return value


def copied(answer: Any) -> Any:
    """A copy of what can be changed in place: dicts, lists, arrays and tensors."""
    if type(answer) is dict:
        return {name: copied(value) for name, value in answer.items()}
    if type(answer) is list:
        return list(answer)
    if isinstance(answer, np.ndarray | torch.Tensor):
        return copy.copy(answer) if isinstance(answer, np.ndarray) else answer.clone()
    return answer


def partly_nan(scores: np.ndarray) -> np.ndarray:
    """`[P, G]` bool: the score is NaN, and that of another completion of the prompt is not.

    Whether a part concerns an example cannot depend on the text, so this NaN is a mistake, such as
    0 divided by 0, which would count 0 without a word.
    """
    missing = np.isnan(scores)
    mixed: np.ndarray = missing & ~missing.all(axis=1, keepdims=True)
    return mixed


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


def distinct_pairs(
    examples: Sequence[Example], texts: Sequence[Sequence[str]]
) -> tuple[list[Example], list[str], np.ndarray]:
    """The distinct (example, text) pairs of `texts`, `[P][G]`, in order of first occurrence.

    Two examples may have the same prompt and different answers, so the prompt does not identify a
    question.

    Returns:
        The examples and the texts of the pairs; and `[P, G]` int, the pair of each completion.
    """
    places: dict[Hashable, dict[str, int]] = {}  # example -> text -> pair
    asked: list[Example] = []
    distinct: list[str] = []
    index: list[list[int]] = []
    for example, group in zip(examples, texts, strict=True):
        question = users_own(example)
        of_example, row = places.setdefault(_identity(question), {}), []
        for text in group:
            if (place := of_example.get(text)) is None:
                of_example[text] = place = len(distinct)
                asked.append(question)
                distinct.append(text)
            row.append(place)
        index.append(row)
    return asked, distinct, np.array(index)


def users_own(example: Example) -> Example:
    """The object that a user's task made: its code gets that one, and not our numbered copy."""
    own: Example = getattr(example, "original", example)
    return own


def _identity(example: Example) -> Hashable:
    """What tells one question from another: all fields of an `Example`.

    A subclass may have more than that, and a user's own objects may be impossible to compare. Such
    an example equals only itself.
    """
    try:
        return _hashable(vars(example)) if type(example) is Example else id(example)
    except TypeError:
        return id(example)


def _hashable(value: Any) -> Hashable:
    """Plain data in a form that can be a key. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return "{", frozenset((name, _hashable(x)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return "[", tuple(map(_hashable, value))
    if value is None or isinstance(value, str | bool | int | float | np.number):
        return type(value), value  # with its type, because True == 1 == 1.0
    raise TypeError


def describe_failure(error: Exception) -> str:
    """What went wrong in a call, short enough for one line of a warning."""
    own = isinstance(error, ConfigError | TimeoutError)
    return one_line(error).removeprefix(f"{type(error).__name__}: ") if own else one_line(error)

"""What gives the reward parts of a task: its `score` or `score_batch`, and its `score_tokens`."""

from collections.abc import Callable, Sequence
from typing import Any

from ..types import Task
from .flags import ConfigError
from .reward_calls import BATCHED, EACH, TOKENS, RewardSource


def check_is_object(task: object) -> None:
    """Raise ConfigError for a class: every call of its `score` would fail, and give the floor."""
    if isinstance(task, type):
        raise ConfigError(f"task must be an object, got the class {task.__name__}")


def task_sources(task: Task, timeout_s: float) -> list[RewardSource]:
    """What gives a task's parts: its score of texts, its `score_tokens`, or both."""
    of_tokens = token_parts(task)
    of_texts = [name for name in task.parts if name not in of_tokens]
    sources = [_text_source(task, of_texts, timeout_s)] if of_texts else []
    if of_tokens:
        score_tokens: Callable[..., Any] = task.score_tokens  # type: ignore[attr-defined]
        sources.append(RewardSource(of_tokens, score_tokens, TOKENS, None, may_be_nan=True))
    return sources


def token_parts(task: Task) -> list[str]:
    """The parts that a task's `score_tokens` gives: all, unless its `token_parts` names some."""
    if getattr(task, "score_tokens", None) is None:
        return []
    named = getattr(task, "token_parts", task.parts)
    return [name for name in task.parts if name in named]


def _text_source(task: Task, names: Sequence[str], timeout_s: float) -> RewardSource:
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
        return RewardSource(names, score_batch, BATCHED, None, may_be_nan=True)
    return RewardSource(names, task.score, EACH, timeout_s, may_be_nan=True)

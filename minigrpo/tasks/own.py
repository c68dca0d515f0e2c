"""Users' Python files: import them, find the task or the reward functions, and call the task.

Importing a file runs it: use only files that you trust. Whatever a user's code raises or returns
becomes one line that names the file and the call. Failures of `score` and of reward functions do
not end a run: runtime/reward_calls.py counts them.
"""

import importlib.util
import numbers
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from ..rewards import RewardFunction
from ..runtime.chat_messages import check_prompt_messages, question_of
from ..runtime.flags import ConfigError
from ..runtime.process_state import Warn, state_kept
from ..runtime.reward_functions import check_number, check_part_name
from ..runtime.text import check_file_name, has_lone_surrogate, one_line, short
from ..types import Example, Task

TASK_MEMBERS = ("parts", "train", "held_out")
SCORES = ("score", "score_tokens")  # a task has one of them
ALL_KINDS = "all"  # the row of all examples in the tables of `minigrpo evaluate`
MAX_INDEX = 2**63
Result = TypeVar("Result")


@dataclass(frozen=True)
class OwnExample(Example):
    """An example of a user's task, numbered by its place in the sequence.

    `index` is the key of the example's random numbers. A task that leaves it at 0 would give all of
    its prompts the same ones. So it is the place here, and the user's code gets its own object.
    """

    original: Example = field(default=Example("", ""))
    where: str = field(default="", compare=False)  # the file, the class and the call, for errors


def silent(text: str) -> None:
    """Show nothing."""


def load_own_task(path: str, seed: int, warn: Warn = silent) -> "OwnTask":
    """Return the task in a Python file.

    Args:
        seed: what the task's class is called with.
        warn: called if the file changes the process, see process_state.py.

    Raises:
        ValueError: in one line that names the file, if it has not exactly one task, or the task
            cannot be made, or has wrong `parts` or `num_held_out`.
    """
    where = f"--task {path}"
    with state_kept(where, warn):
        module = _load(path, "--task")
        found = guarded(where, lambda: [x for x in vars(module).values() if _is_task(x, module)])
        if len(found) != 1:
            raise ConfigError(
                f"{where}: must have one class with parts, train, held_out and score, "
                f"has {', '.join(x.__name__ for x in found) or 'none'}"
            )
        name = f"{where}: {found[0].__name__}"
        return OwnTask(guarded(name, lambda: found[0](seed)), name)


def _is_task(value: object, module: ModuleType) -> bool:
    """Whether a value in a file is a task's class, and not one that the file imports."""
    return (
        isinstance(value, type)
        and value.__module__ == module.__name__
        and all(hasattr(value, member) for member in TASK_MEMBERS)
        and any(hasattr(value, member) for member in SCORES)
    )


def load_rewards(path: str, warn: Warn = silent) -> list[RewardFunction]:
    """Return the functions that a Python file decorates with `@minigrpo.reward`; none for "".

    `warn` is called if the file changes the process, see process_state.py.

    Raises:
        ValueError: in one line, for a file that cannot be imported or has no such function.
    """
    if not path:
        return []
    with state_kept(f"--rewards {path}", warn):
        values = vars(_load(path, "--rewards")).values()
    # by identity, because one function may have two names in its file
    found = list({id(x): x for x in values if isinstance(x, RewardFunction)}.values())
    if not found:
        raise ConfigError(f"--rewards {path}: has no function decorated with @minigrpo.reward()")
    return found


def _load(path: str, flag: str) -> ModuleType:
    """Import a Python file. Raises ValueError, which names the flag, if that fails."""
    where = f"{flag} {path}"
    try:
        check_file_name(path)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None
    spec = importlib.util.spec_from_file_location(f"minigrpo_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"{where}: must be a Python file that exists")
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module there
    guarded(where, lambda: loader.exec_module(module))
    return module


def guarded(where: str, call: Callable[[], Result]) -> Result:
    """Return `call()`; whatever it raises becomes a ConfigError in one line.

    A user's code may call `sys.exit()` or raise its own kind of BaseException. Neither may end the
    process without a word. Ctrl-C does; Python raises it in the main thread only.
    """
    try:
        return call()
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise ConfigError(f"{where}: {one_line(error)}") from error
    except ConfigError as error:  # one of the library's own checks: its message says enough
        raise ConfigError(f"{where}: {error}") from error
    except BaseException as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error


class OwnTask:
    """A user's task, with a check on everything that it returns.

    Every error is a ConfigError in one line that names the file, the class and the call.
    """

    def __init__(self, users: Task, name: str) -> None:
        """
        Args:
            users: the user's object.
            name: how errors begin: the flag, the file and the class.
        """
        self.users, self.name = users, name
        self.parts: Mapping[str, float] = guarded(name, lambda: _checked_parts(users.parts))
        size = guarded(name, lambda: getattr(users, "num_held_out", None))
        if size is not None and not (_is_whole(size) and size >= 1):
            raise ConfigError(
                f"{name}: num_held_out must be a whole number of at least 1, or None for an "
                f"endless supply, got {short(size)}"
            )
        self.num_held_out: int | None = None if size is None else int(size)
        self.success: str = guarded(name, lambda: _checked_success(users, self.parts))
        if guarded(name, lambda: getattr(users, "summaries", None)) is not None:
            self.summaries = self._summaries
        if guarded(name, lambda: getattr(users, "explain", None)) is not None:
            self.explain = self._explain
        # without it, RewardScorer calls `score`
        if guarded(name, lambda: getattr(users, "score_batch", None)) is not None:
            self.score_batch = self._score_batch
        for member in ("about", "judged_by"):
            if said := guarded(name, partial(getattr, users, member, "")):
                guarded(name, partial(check_text, member, said))
                setattr(self, member, str(said))
        for member in ("score_tokens", "token_parts"):
            if (theirs := guarded(name, partial(getattr, users, member, None))) is not None:
                setattr(self, member, theirs)

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._example("train", number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`; beyond `num_held_out` they repeat."""
        number = number % self.num_held_out if self.num_held_out else number
        return self._example("held_out", number)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every reward part of one text. The scorer checks it, and counts failures."""
        return self.users.score(getattr(example, "original", example), text)

    def _score_batch(self, examples: Sequence[Example], texts: Sequence[str]) -> Any:
        users: Any = self.users
        call = f"{self.name}: score_batch of {len(texts)} texts"
        return guarded(call, lambda: users.score_batch(examples, texts))

    def _summaries(self, parts: Mapping[str, np.ndarray]) -> dict[str, float]:
        users: Any = self.users
        call = f"{self.name}: summaries"
        return guarded(call, lambda: _checked_summaries(users.summaries(parts)))

    def _explain(self, example: Example, text: str) -> str:
        users: Any = self.users
        original = getattr(example, "original", example)
        call = f"{self.name}: explain"
        return guarded(call, lambda: str(users.explain(original, text)))

    def _example(self, split: str, number: int) -> Example:
        call = f"{self.name}: {split}({number})"
        try:
            example = guarded(call, lambda: getattr(self.users, split)(number))
        except ConfigError as error:
            if split == "held_out" and number and self.num_held_out is None:
                hint = f"{error}; a task with {number} held-out examples sets num_held_out"
                raise ConfigError(hint) from error
            raise
        return guarded(call, lambda: _numbered(example, number, call))


def _checked_parts(parts: object) -> dict[str, float]:
    """A task's reward parts and weights. Raises ConfigError for anything else."""
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(
            f"parts must be a dict of at least one name and weight, got {short(parts)}"
        )
    for name, weight in parts.items():
        check_part_name(name)
        check_number(f"the weight of part {name}", weight)
    return {name: float(weight) for name, weight in parts.items()}


def _checked_success(users: Task, parts: Mapping[str, float]) -> str:
    """The part that a task calls its success, "" for none. Raises ConfigError for another name."""
    success = getattr(users, "success", "")
    if success not in ("", *parts):
        raise ConfigError(f"success must be one of the parts {', '.join(parts)}, got {success!r}")
    return str(success)


def _checked_summaries(found: Any) -> dict[str, float]:
    """What a task's `summaries` returns; NaN is allowed. Raises ConfigError for anything else."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"must return a dict of names and numbers, got {short(found)}")
    for name, value in found.items():
        check_part_name(name)
        if not isinstance(value, numbers.Real):
            raise ConfigError(f"{name} must be a number, got {short(value)}")
    return {name: float(value) for name, value in found.items()}


def _numbered(example: object, number: int, where: str) -> OwnExample:
    """A user's example, checked, and numbered by its place. Raises ConfigError."""
    if not isinstance(example, Example):
        raise ConfigError(f"must return a minigrpo.types.Example, got {short(example)}")
    for name in ("prompt", "answer", "kind"):
        check_text(name, getattr(example, name))
    messages = _checked_messages(example.messages)
    if not (example.prompt or messages):
        raise ConfigError("the prompt is empty")
    if example.kind == ALL_KINDS:
        raise ConfigError(f"kind must not be {ALL_KINDS!r}, the name of all examples together")
    if not (_is_whole(example.index) and 0 <= example.index < MAX_INDEX):
        raise ConfigError(
            f"index must be a whole number from 0 to 2**63 - 1, got {short(example.index)}"
        )
    fields = example.fields
    if not (isinstance(fields, Mapping) and all(isinstance(name, str) for name in fields)):
        raise ConfigError(f"fields must be a dict whose keys are text, got {short(fields)}")
    prompt, answer, kind = str(example.prompt), str(example.answer), str(example.kind)
    prompt = prompt or question_of(messages)
    return OwnExample(prompt, answer, number, kind, messages, fields, original=example, where=where)


def _checked_messages(messages: Any) -> tuple[dict[str, str], ...]:
    """The messages of a user's example, copied. Raises ConfigError for anything else."""
    if isinstance(messages, tuple) and not messages:
        return ()
    try:
        check_prompt_messages(messages)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple({key: str(text) for key, text in message.items()} for message in messages)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_text(what: str, value: object) -> None:
    """Raise ConfigError, which begins with `what`, unless a value is text that can be written."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be text, got {short(value)}")
    if has_lone_surrogate(value):
        raise ConfigError(f"{what} has half of a surrogate pair, which is no character")

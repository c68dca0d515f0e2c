"""Reward functions of users: the decorator, its checks, a call of a function, and its answer."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import Levenshtein
import numpy as np
import torch

from ..errors import ConfigError, refusing
from ..runtime.calls import WorkerProcesses, finished
from ..types import REWARD, Example, Scores
from ..userfiles import load_file, name_of

# names in place of those that a function cannot have: `reward` is the weighted sum
OTHER_NAMES = {"<lambda>": "function", REWARD: "reward_function"}


@dataclass(frozen=True)
class RewardFunction:
    """A function with the decorator `reward`, which explains the fields."""

    function: Callable[..., Any]
    name: str = ""  # the function's own name if it is empty
    weight: float = 1.0
    batched: bool = False
    grouped: bool = False
    tokens: bool = False
    success: bool = False
    timeout_s: float = 10.0
    process: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a function that cannot be called so, such as one of TRL's."""
        name = self.name or name_of(self.function)
        object.__setattr__(self, "name", OTHER_NAMES.get(name, name))
        with refusing(f"reward {self.name}"):
            if self.process and not self.is_importable:
                raise ConfigError("process=True needs a function at the top of a file, not async")
            if self.batched + self.grouped + self.tokens > 1:
                raise ConfigError("give one of batched, grouped and tokens")
        arguments = ["batch"] if self.tokens else ["example", "text"]
        signature = inspect.signature(self.function)
        with refusing(f"reward {self.name}: must take ({', '.join(arguments)})"):
            if "completions" in signature.parameters:
                raise TypeError("TRL's columns are example.fields (docs/trl.md)")
            signature.bind(*arguments)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def is_importable(self) -> bool:
        """Whether a worker process can import the function, and call it without an event loop."""
        function = self.function
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            return False
        is_at_top = "<" not in function.__qualname__
        return is_at_top and function.__module__ != "__main__"

    @cached_property
    def workers(self) -> WorkerProcesses:
        return WorkerProcesses(self.function.__module__, self.function.__qualname__)

    def scores(self, examples: Sequence[Example], texts: Sequence[str]) -> Scores:
        """Call a function of texts once for any texts, for a group, or for one: `[n]` scores."""
        timeout_s = self.timeout_s * len(texts)
        takes_several = self.batched or self.grouped
        example = examples if self.batched else examples[0]
        arguments = example, texts if takes_several else texts[0]
        if self.process:
            answer = self.workers.call(arguments, timeout_s)
        else:
            answer = finished(self.function(*arguments), timeout_s)
        return as_scores(answer if takes_several else [answer], len(texts))


def reward(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: make a function a reward function, known by its name.

        @reward(weight=0.2)
        def brevity(example, text):
            return 1 / (1 + len(text))

    The calls of an `async` function run side by side. A function returns None where it does not
    concern the row. A call that raises, takes too long or returns no finite number has failed: the
    completion counts as the worst of its group.

    Args:
        name: the name in place of the function's own.
        weight: the weight in the total (default 1); --reward-weights overrides it.
        batched: the function takes lists of examples and texts, and returns a float per text. It
            sees each distinct text of a prompt once, and which texts share a call is not fixed.
        grouped: the function takes an example and all completions of its prompt, duplicates
            included, and returns a float per completion. A greedy completion is a group of one.
        tokens: the function takes a `task.TokenBatch`, and returns `[P, G]` floats. It has no time
            limit, and an error in it ends the run.
        success: the function returns 1 for a right completion; evaluations and pass@k count these.
        timeout_s: the limit in seconds per completion (default 10).
        process: worker processes, which can be killed, call the function, because it may hold
            Python's lock for long, as a regex does. It must be at the top of a module or file.
    """
    if function is None:
        return partial(RewardFunction, **options)
    return RewardFunction(function, **options)


def load_rewards(path: str) -> list[RewardFunction]:
    """The decorated functions in a Python file, imported ones included. It is run: trust it."""
    values = vars(load_file(path)).values()
    decorated = [value for value in values if isinstance(value, RewardFunction)]
    if not decorated:
        raise ConfigError(f"--rewards {path}: has no function decorated with @minigrpo.reward")
    return decorated


def similarity(text: str, other: str) -> float:
    """1 - d / n in [0, 1], for a Levenshtein distance d and the length n of the longer text."""
    longest = max(len(text), len(other))
    return 1 - Levenshtein.distance(text, other) / longest if longest else 1.0


def as_numbers(answer: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of an answer as float64. Raises an error unless it is finite numbers of this shape."""
    numbers = _as_array(answer, shape)
    if not np.isfinite(numbers).all():
        raise ValueError(f"returned {answer!r:.80}, which is not finite")
    return numbers


def as_scores(answers: Any, number: int) -> Scores:
    """What a reward answers for `number` texts. Raises an error for answers of another shape."""
    applies = np.ones(number, dtype=bool)
    if isinstance(answers, list | tuple):
        applies = np.array([answer is not None for answer in answers], dtype=bool)
        answers = [0.0 if answer is None else answer for answer in answers]
    numbers = _as_array(answers, (number,))
    is_finite = np.isfinite(numbers)
    known = applies & is_finite
    return Scores(np.where(known, numbers, 0.0), known, failed=~is_finite)


def _as_array(answer: Any, shape: tuple[int, ...]) -> np.ndarray:
    with refusing(f"returned {answer!r:.80}"):
        tensor = torch.as_tensor(answer, dtype=torch.float64, device="cpu")
    if tensor.shape != shape:
        raise ValueError(f"returned {answer!r:.80}, not numbers of the shape {list(shape)}")
    return tensor.detach().numpy().copy()

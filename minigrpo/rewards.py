"""Reward functions: the decorator, and the scorer that calls them and the task.

Each distinct (example, text) is scored once, except by functions of whole groups. The task is
trusted: it has no time limit, and an error in it ends the run. A function may hang or raise or
return no number: then its completions get 0, and the failure is counted. Threads do not make
scoring chess faster, because python-chess holds the interpreter lock (GIL); they run several
programs or network calls side by side.
"""

import copy
import inspect
import runpy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from .errors import ConfigError, refusing
from .fen import is_valid_fen as is_valid_fen
from .runtime.pool import Pool
from .task import Task, TokenBatch
from .types import EXACT, REWARD, Dialogue, Example, RewardTable, Warn

RESERVED = ("step", "n", "reward")  # keys of eval.jsonl beside the measures


# of two texts: 1 - levenshtein(a, b) / max(len(a), len(b)), in [0, 1]; 1 for two empty texts
similarity = Levenshtein.normalized_similarity


# --- the decorator ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFunction:
    """A function with the decorator `reward`, which explains the fields."""

    function: Callable[..., Any]
    weight: float = 1.0
    batched: bool = False
    grouped: bool = False
    tokens: bool = False
    success: bool = False
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a function that cannot be called so, such as one of TRL's."""
        arguments = ["batch"] if self.tokens else ["example", "text"]  # lists, if it is batched
        signature = inspect.signature(self.function)
        with refusing(f"reward {self.name}: must take ({', '.join(arguments)})"):
            if "completions" in signature.parameters:
                raise TypeError("TRL's columns are example.fields (docs/trl.md)")
            signature.bind(*arguments)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def values(self, examples: Sequence[Example], texts: Sequence[str]) -> np.ndarray:
        """`[n]` values of n texts: of any, of a group, or of one; NaN where there is no number."""
        # code may empty a list in `fields`, or the messages of a dialogue
        examples = [copy.deepcopy(x) for x in examples]
        texts = [copy.deepcopy(x) for x in texts]
        if self.batched or self.grouped:
            answers = self.function(examples if self.batched else examples[0], texts)
            if isinstance(answers, list):
                answers = [np.nan if x is None else x for x in answers]
            return as_numbers(answers, (len(texts),), partly=True)
        return as_numbers(self.function(examples[0], texts[0]), ()).reshape(1)


def reward(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: make a function a reward function, known by its name.

        @reward(weight=0.2)
        def brevity(example, text):
            return 1 / (1 + len(text))

    `--rewards FILE.py` adds the decorated functions of a file to the task's. A call that raises,
    takes too long or returns no finite number has failed: the failure is counted, and the
    completion gets 0.

    Args:
        weight: in the total (default 1); --reward-weights overrides it.
        batched: it takes lists of examples and texts, and returns a float per text, as a reward
            model does. Which texts share a call is not fixed, so a text's score should depend on
            that text alone.
        grouped: it takes an example and all completions of its prompt, duplicates included, and
            returns a float per completion. A greedy completion of an evaluation is a group of one.
        tokens: it takes a `task.TokenBatch`, and returns `[P, G]` floats. It has no time limit,
            and an error in it ends the run.
        success: it returns 1 for a right completion, and anything else for others. Evaluations and
            pass@k then count by it.
        timeout_s: seconds per completion (default 10).
    """
    if function is None:
        return partial(RewardFunction, **options)
    return RewardFunction(function, **options)


def load_rewards(path: str) -> list[RewardFunction]:
    """The functions that a Python file decorates with `@minigrpo.reward`. It is run: trust it."""
    found = [x for x in runpy.run_path(path).values() if isinstance(x, RewardFunction)]
    if not found:
        raise ConfigError(f"--rewards {path}: has no function decorated with @minigrpo.reward")
    return found


# --- the scorer ---------------------------------------------------------------------------------


def as_numbers(answer: Any, shape: tuple[int, ...], partly: bool = False) -> np.ndarray:
    """A copy of an answer as float64. An error unless it is finite numbers of this shape.

    With `partly`, NaN stands for those that are not finite.
    """
    numbers = torch.as_tensor(answer, dtype=torch.float64, device="cpu").detach().numpy()
    finite = np.isfinite(numbers)
    if numbers.shape != shape or not (partly or finite.all()):
        raise ValueError(f"returned {answer!r:.80}, not finite numbers of the shape {list(shape)}")
    return np.where(finite, numbers, np.nan)


class RewardScorer:
    """Calls the task and the reward functions for a batch of completions."""

    def __init__(
        self,
        task: Task,
        *,
        weights: Mapping[str, float] | None = None,
        functions: Sequence[RewardFunction] = (),
        workers: int = 0,
        warn: Warn = lambda text: None,
        token_model: Any = None,
        tokenizer: Any = None,
    ) -> None:
        """
        Args:
            weights: of each function in the total; those that are not named weigh 0. None or empty:
                the weights of the task and of the functions.
            functions: reward functions beside the task's.
            workers: calls side by side.
            warn: called with the first failure of each function.
            token_model: for functions of tokens: from a name to a frozen model.
            tokenizer: the policy's, for functions of tokens.
        """
        self.environments: Mapping[str, float] = task.world.parts if task.world else {}
        self.names = [*task.parts, *self.environments, *(x.name for x in functions)]
        own = {**task.parts, **self.environments, **{x.name: x.weight for x in functions}}
        self.task, self.weights = task, dict(weights or own)
        self.success = next((f.name for f in functions if f.success), task.success)
        for name in {*self.names, *self.weights} | ({self.success} - {EXACT, REWARD}):
            if self.names.count(name) != 1 or name in RESERVED or not name.isidentifier():
                raise ConfigError(
                    f"reward {name}: must be a word that names one of {', '.join(self.names)}"
                )
        self.text_parts = [name for name in task.parts if name not in task.token_parts]
        self.functions, self.token_model, self.tokenizer = functions, token_model, tokenizer
        self.workers, self.warn, self.warned = max(1, workers), warn, set[str]()

    @torch.no_grad()
    def score(
        self,
        examples: Sequence[Example],
        texts: Sequence[Sequence[Any]],  # str, or Dialogue
        completions: Any = None,
        temperature: float = 1.0,
    ) -> RewardTable:
        """Score `texts`, `[P][G]`.

        Args:
            completions: the `Completions` of these texts; only functions of tokens need them.
            temperature: that of the samples.
        """
        shape = len(texts), len(texts[0])
        flat, size = [text for group in texts for text in group], shape[1]
        # dialogues may differ although their last turns are equal
        keys = [(i // size, id(x) if isinstance(x, Dialogue) else x) for i, x in enumerate(flat)]
        places = dict[Any, int]()  # of distinct texts
        same = np.array([places.setdefault(key, i) for i, key in enumerate(keys)])
        distinct = [*places.values()]
        parts, failures = dict[str, np.ndarray](), dict[str, int]()
        for name in self.environments:
            parts[name] = np.array([x.rewards.get(name, np.nan) for x in flat]).reshape(shape)
            failures[name] = sum(x.failed for x in flat if name in x.rewards)

        def pairs(call: Any) -> tuple[list[Example], list[str]]:
            return [examples[i // size] for i in call], [flat[i] for i in call]

        def batch() -> TokenBatch:  # a copy for each: the loss needs the log-probs as they are
            own = copy.deepcopy((examples, texts, completions))
            return TokenBatch(*own, temperature, self.tokenizer.decode, self.token_model)

        if self.task.token_parts:
            by_token = self.task.score_tokens(batch())
            parts |= {x: np.asarray(by_token[x], np.float64) for x in self.task.token_parts}
        if self.text_parts:
            share = -(-len(distinct) // self.workers)
            pieces = [distinct[i : i + share] for i in range(0, len(distinct), share)]
            with ThreadPoolExecutor(self.workers) as pool:  # a single thread would only cost time
                each = pool.map if len(pieces) > 1 else map
                rows = list(each(lambda piece: self.task.score_batch(*pairs(piece)), pieces))
            for name in self.text_parts:
                values = np.zeros(len(flat))
                values[distinct] = np.concatenate([x[name] for x in rows])
                parts[name] = values[same].reshape(shape)
        for function in self.functions:
            if function.tokens:
                parts[function.name] = as_numbers(function(batch()), shape)
                continue
            calls: Any = [(i,) for i in distinct]
            if function.grouped:
                calls = [range(i, i + size) for i in range(0, len(flat), size)]
            elif function.batched:
                calls = [tuple(distinct)]
            values = np.full(len(flat), np.nan)  # where a call fails
            self._run(function, calls, pairs, values)
            values = (values if function.grouped else values[same]).reshape(shape)
            failures[function.name] = int(np.isnan(values).sum())
            parts[function.name] = np.nan_to_num(values)
        terms = (weight * parts[name] for name, weight in self.weights.items())
        total = np.nansum([np.zeros(shape), *terms], 0)  # NaN: a completion has no such reward
        return RewardTable(total, {name: parts[name] for name in self.names}, failures)

    def _run(self, function: RewardFunction, calls: Any, pairs: Any, values: np.ndarray) -> None:
        """Fill in the values of the calls that do not fail.

        Args:
            calls: the places in `values` of each call.
            pairs: from these to the examples and texts.
        """
        pool = Pool(self.workers)
        for call in calls:
            pool.submit(
                call, partial(function.values, *pairs(call)), function.timeout_s * len(call)
            )
        for places, found, error in pool.all():
            if error is None:
                values[[*places]] = found
            # a line per failure would flood the log
            if np.isnan(values[[*places]]).any() and function.name not in self.warned:
                self.warned.add(function.name)
                error = error or ValueError("no finite number")
                self.warn(f"reward {function.name}: {error!r:.200}; such completions get 0")
        pool.close()

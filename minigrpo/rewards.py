"""Reward functions: the decorator, and the scorer that calls them and the task.

Each distinct (example, text) is scored once, except by functions of whole groups. The task is
trusted: it has no time limit, and an error in it ends the run. A function may hang or raise or
return no number: then its completions get 0, and the failure is counted. Threads do not make
scoring chess faster, because python-chess holds the interpreter lock (GIL); they run several
programs or network calls side by side.
"""

import copy
import inspect
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
from .model.tokenizer import Tokenizer
from .runtime.pool import Pool
from .task import Task, TokenBatch
from .types import EXACT, REWARD, Completions, Dialogue, Example, RewardTable, Warn
from .userfiles import load_file, place_of

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
        examples = [copy.deepcopy(example) for example in examples]
        texts = [copy.deepcopy(text) for text in texts]
        if self.batched or self.grouped:
            answers = self.function(examples if self.batched else examples[0], texts)
            if isinstance(answers, list):
                answers = [np.nan if answer is None else answer for answer in answers]
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
    """The decorated functions in a Python file, imported ones included. It is run: trust it."""
    values = vars(load_file(path)).values()
    functions = [value for value in values if isinstance(value, RewardFunction)]
    if not functions:
        raise ConfigError(f"--rewards {path}: has no function decorated with @minigrpo.reward")
    return functions


def refuse_failing(rewards: RewardTable) -> None:
    """Raise ConfigError if a function, or an environment, fails on all completions."""
    for name, num_failed in rewards.failures.items():
        if num_failed == rewards.total.size:
            raise ConfigError(f"reward {name} fails on all completions before the first step")


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


Places = Sequence[int]  # of texts in a batch


class TextBatch:
    """The texts of a batch by their places 0 to P * G - 1, and which of them are distinct.

    Of the groups [a, b, a] and [b, c, b] the distinct ones stand at the places [0, 1, 3, 4], and
    `same` is [0, 1, 0, 2, 3, 2]: examples differ, so b is two texts.
    """

    def __init__(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> None:
        """`texts`: `[P][G]`, of which some may be a `Dialogue`."""
        self.shape = len(texts), len(texts[0])
        self.texts = [text for group in texts for text in group]
        self.examples = [example for example in examples for _ in range(self.shape[1])]
        numbers: dict[tuple[int, str | int], int] = {}  # of distinct texts
        self.distinct: list[int] = []  # places
        self.same: list[int] = []  # of each place, the number of its distinct text
        for place, text in enumerate(self.texts):
            # dialogues may differ although their last turns are equal
            content = id(text) if isinstance(text, Dialogue) else text
            number = numbers.setdefault((place // self.shape[1], content), len(numbers))
            if number == len(self.distinct):
                self.distinct.append(place)
            self.same.append(number)

    def pairs(self, places: Places) -> tuple[list[Example], list[str]]:
        """The examples and the texts of some places."""
        return [self.examples[place] for place in places], [self.texts[place] for place in places]

    def spread(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """`[P, G]` float64 from the values of the distinct texts."""
        return np.asarray(values, dtype=np.float64)[self.same].reshape(self.shape)


class RewardScorer:
    """Calls the task and the reward functions for a batch of completions."""

    def __init__(
        self,
        task: Task,
        *,
        weights: Mapping[str, float] | None = None,
        functions: Sequence[RewardFunction] = (),
        environments: Mapping[str, float] | None = None,
        workers: int = 0,
        warn: Warn = lambda text: None,
        tokenizer: Tokenizer | None = None,
        token_model: Callable[[str], Any] | None = None,
    ) -> None:
        """
        Args:
            weights: of each function in the total; those that are not named weigh 0. None or empty:
                the weights of the task, the environments and the functions.
            functions: reward functions beside the task's.
            environments: those that give a reward, and their weights.
            workers: calls side by side.
            warn: called with the first failure of each function.
            tokenizer: the policy's, for functions of tokens.
            token_model: for functions of tokens: from a name to a frozen model.
        """
        self.task = task
        self.functions = functions
        self.environments = environments or {}
        self.workers = max(1, workers)
        self.warn = warn
        self.warned: set[str] = set()
        self.tokenizer = tokenizer
        self.token_model = token_model

        of_functions = {function.name: function.weight for function in functions}
        own_weights = {**task.parts, **self.environments, **of_functions}
        self.weights = dict(weights or own_weights)
        self.names = [*task.parts, *self.environments, *(function.name for function in functions)]
        self.text_parts = [name for name in task.parts if name not in task.token_parts]
        self.success = next((f.name for f in functions if f.success), task.success)
        for name in {*self.names, *self.weights} | ({self.success} - {EXACT, REWARD}):
            if self.names.count(name) != 1 or name in RESERVED or not name.isidentifier():
                raise ConfigError(
                    f"reward {name}: must be once in {', '.join(self.names)}, and a word"
                )

    @torch.no_grad()
    def score(
        self,
        examples: Sequence[Example],
        texts: Sequence[Sequence[str]],
        completions: Completions | None = None,
        temperature: float = 1.0,
    ) -> RewardTable:
        """Score `texts`, `[P][G]`.

        Args:
            completions: those of these texts; only functions of tokens need them.
            temperature: that of the samples.
        """
        batch = TextBatch(examples, texts)
        parts: dict[str, np.ndarray] = {}
        failures: dict[str, int] = {}

        def tokens() -> TokenBatch:
            """A copy for each function: the loss needs the log-probs as they are."""
            assert completions and self.tokenizer and self.token_model
            copies = copy.deepcopy((examples, texts, completions))
            return TokenBatch(*copies, temperature, self.tokenizer.decode, self.token_model)

        dialogues = [text for text in batch.texts if isinstance(text, Dialogue)]
        for name in self.environments:
            rewards = [dialogue.rewards.get(name, np.nan) for dialogue in dialogues]
            parts[name] = np.array(rewards).reshape(batch.shape)
            failures[name] = sum(x.failed for x in dialogues if name in x.rewards)
        if self.task.token_parts:
            by_token = self.task.score_tokens(tokens())
            parts |= {name: np.asarray(by_token[name], float) for name in self.task.token_parts}
        if self.text_parts:
            parts |= self._of_task(batch)
        for function in self.functions:
            if function.tokens:
                parts[function.name] = as_numbers(function(tokens()), batch.shape)
            else:
                values = self._of_function(function, batch)
                parts[function.name] = np.nan_to_num(values)
                failures[function.name] = int(np.isnan(values).sum())
        terms = [weight * parts[name] for name, weight in self.weights.items()]
        # NaN: a completion has no such reward
        total = np.nansum([np.zeros(batch.shape), *terms], axis=0)
        return RewardTable(total, {name: parts[name] for name in self.names}, failures)

    def _of_task(self, batch: TextBatch) -> dict[str, np.ndarray]:
        """The task's parts of texts, `[P, G]` each."""
        share = -(-len(batch.distinct) // self.workers)
        pieces = [
            batch.pairs(batch.distinct[start : start + share])
            for start in range(0, len(batch.distinct), share)
        ]
        if len(pieces) > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                scores = [*pool.map(lambda piece: self.task.score_batch(*piece), pieces)]
        else:  # a single thread would only cost time
            scores = [self.task.score_batch(*piece) for piece in pieces]
        return {
            name: batch.spread(np.concatenate([score[name] for score in scores]))
            for name in self.text_parts
        }

    def _of_function(self, function: RewardFunction, batch: TextBatch) -> np.ndarray:
        """A function's values, `[P, G]`; NaN where it failed."""
        # 1. The places of the texts of each call.
        calls: list[Places] = [[place] for place in batch.distinct]
        if function.grouped:
            num_prompts, size = batch.shape
            calls = [range(p * size, (p + 1) * size) for p in range(num_prompts)]
        elif function.batched:
            calls = [batch.distinct]

        # 2. Call it.
        values = np.full(len(batch.texts), np.nan)  # by place
        pool = Pool(self.workers)
        for number, places in enumerate(calls):
            call = partial(function.values, *batch.pairs(places))
            pool.submit(number, call, function.timeout_s * len(places))
        for number, answer, error in pool.all():
            places = [*calls[number]]
            if error is None:
                values[places] = answer
            # a line per failure would flood the log
            if np.isnan(values[places]).any() and function.name not in self.warned:
                self.warned.add(function.name)
                error = error or ValueError("no finite number")
                said = f"{place_of(error)}{error!r:.200}"
                self.warn(f"reward {function.name}: {said}; such completions get 0")
        pool.close()
        if function.grouped:
            return values.reshape(batch.shape)
        return batch.spread(values[batch.distinct])

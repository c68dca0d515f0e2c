"""Reward functions: the decorator, and the scorer that calls them and the task.

Each distinct (example, text) is scored once, except by functions of whole groups. The task is
trusted: it has no time limit, and an error in it ends the run. A function may hang or raise or
return no number: it has failed, and the completion counts as the worst of its group.
"""

import copy
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from .advantages import neutral
from .errors import ConfigError, refusing
from .fen import is_valid_fen as is_valid_fen
from .model.tokenizer import Tokenizer
from .runtime.guard import RunFailed
from .runtime.pool import Pool, WorkerProcesses, awaited, seconds
from .runtime.watchdog import UNMARKED, Watchdog
from .task import Task, TokenBatch
from .types import EXACT, REWARD, Completions, Dialogue, Example, RewardTable, Warn
from .userfiles import failure, load_file, name_of

MOST_FAILING = 3  # steps in a row in which a reward fails on all completions
RESERVED = ("step", "n", "reward")  # keys of eval.jsonl beside the measures

# of two texts: 1 - levenshtein(a, b) / max(len(a), len(b)), in [0, 1]; 1 for two empty texts
similarity = Levenshtein.normalized_similarity


@dataclass(frozen=True)
class RewardFunction:
    """A function with the decorator `reward`, which explains the fields."""

    function: Callable[..., Any]
    name: str = ""  # empty: the function's own
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
        object.__setattr__(self, "name", "function" if name == "<lambda>" else name)
        arguments = ["batch"] if self.tokens else ["example", "text"]  # lists, if it is batched
        signature = inspect.signature(self.function)
        with refusing(f"reward {self.name}: must take ({', '.join(arguments)})"):
            if "completions" in signature.parameters:
                raise TypeError("TRL's columns are example.fields (docs/trl.md)")
            signature.bind(*arguments)
        with refusing(f"reward {self.name}"):
            seconds(self.timeout_s)
        check_weight(name, self.weight)
        is_found = inspect.isfunction(self.function) and "<" not in self.function.__qualname__
        if self.process and (
            not is_found or self.is_async or self.function.__module__ == "__main__"
        ):
            needed = "a function at the top of a file of its own, not async"
            raise ConfigError(f"reward {self.name}: process=True needs {needed}")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def is_async(self) -> bool:
        kind: Any = type(self.function)  # perhaps of an object that is called
        return any(map(inspect.iscoroutinefunction, (self.function, kind.__call__)))

    @cached_property
    def workers(self) -> WorkerProcesses:
        return WorkerProcesses(self.function.__module__, self.function.__qualname__)

    def scores(self, examples: Sequence[Example], texts: Sequence[str]) -> "Scores":
        """The scores of any texts, of a group, or of one text."""
        timeout_s = self.timeout_s * len(texts)
        asks_several = self.batched or self.grouped
        arguments = (examples if self.batched else examples[0], texts if asks_several else texts[0])
        if self.process:
            answer = self.workers.call(arguments, timeout_s)
        else:
            answer = self.function(*arguments)
            if inspect.isawaitable(answer):
                answer = awaited(answer, timeout_s)
        return as_scores(answer if asks_several else [answer], len(texts))


def reward(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: make a function a reward function, known by its name.

        @reward(weight=0.2)
        def brevity(example, text):
            return 1 / (1 + len(text))

    `--rewards FILE.py` adds the decorated functions of a file to the task's. It may be `async`:
    then all calls of a batch run side by side.

    A call that raises, takes too long or returns no finite number has failed: the completion gets
    the worst value of its group. None: the reward does not concern the row, and is left out.

    Args:
        name: in place of the function's own.
        weight: in the total (default 1); --reward-weights overrides it.
        batched: it takes lists of examples and texts, and returns a float per text, as a reward
            model does. It sees each distinct text of a prompt once. Which texts share a call is
            not fixed, so a text's score should depend on that text alone.
        grouped: it takes an example and all completions of its prompt, duplicates included, and
            returns a float per completion. A greedy completion of an evaluation is a group of one.
        tokens: it takes a `task.TokenBatch`, and returns `[P, G]` floats. It has no time limit,
            and an error in it ends the run.
        success: it returns 1 for a right completion, and anything else for others. Evaluations and
            pass@k then count by it.
        timeout_s: seconds per completion (default 10).
        process: call it in worker processes, which can be killed: for code that may hold Python's
            lock for long, such as a regex. It must have its name in a module or file.
    """
    if function is None:
        return partial(RewardFunction, **options)
    return RewardFunction(function, **options)


def check_weight(name: str, weight: float) -> None:
    """Raise ConfigError unless a weight is a finite number."""
    with refusing(f"reward {name}: weight {weight!r}"):
        if not math.isfinite(weight):
            raise ValueError("must be a finite number")


def named_apart(functions: Iterable[RewardFunction]) -> list[RewardFunction]:
    """The functions, each under a name of its own: f, f_2, f_3."""
    by_name: dict[str, RewardFunction] = {}
    for function in functions:
        name = function.name
        n = 1
        while name in by_name:
            n += 1
            name = f"{function.name}_{n}"
        by_name[name] = replace(function, name=name)
    return [*by_name.values()]


def load_rewards(path: str) -> list[RewardFunction]:
    """The decorated functions in a Python file, imported ones included. It is run: trust it."""
    values = {id(value): value for value in vars(load_file(path)).values()}.values()  # each once
    functions = named_apart(value for value in values if isinstance(value, RewardFunction))
    if not functions:
        raise ConfigError(f"--rewards {path}: has no function decorated with @minigrpo.reward")
    return functions


# of texts: a number each; NaN: the reward failed; None: it does not concern the text
Scores = Sequence[float | None]


def as_numbers(answer: Any, shape: tuple[int, ...], partly: bool = False) -> np.ndarray:
    """A copy of an answer as float64. An error unless it is finite numbers of this shape.

    With `partly`, NaN stands for those that are not finite.
    """
    numbers = torch.as_tensor(answer, dtype=torch.float64, device="cpu").detach().numpy()
    finite = np.isfinite(numbers)
    if numbers.shape != shape or not (partly or finite.all()):
        raise ValueError(f"returned {answer!r:.80}, not finite numbers of the shape {list(shape)}")
    return np.where(finite, numbers, np.nan)


def as_scores(answers: Any, number: int) -> Scores:
    """What a reward has answered for `number` texts. An error for answers of another shape."""
    absent = set[int]()
    if isinstance(answers, np.ndarray) and answers.dtype == object:
        answers = answers.tolist()
    if isinstance(answers, list | tuple):
        absent = {place for place, answer in enumerate(answers) if answer is None}
        answers = [0.0 if answer is None else answer for answer in answers]
    numbers = as_numbers(answers, (number,), partly=True).tolist()
    return [None if place in absent else x for place, x in enumerate(numbers)]


def settled(scores: Scores, shape: tuple[int, int], weight: float) -> tuple[np.ndarray, np.ndarray]:
    """`[P, G]` values, in which a failure counts as the worst of its group; and what has failed.

    Of a group of failures alone, it counts as the worst of the batch: the group teaches nothing,
    and an evaluation does not leave it out. NaN is where a reward does not concern a text.
    """
    values = np.array(scores, dtype=np.float64).reshape(shape)
    failed = np.array([score is not None for score in scores]).reshape(shape) & np.isnan(values)
    worst = np.fmin if weight >= 0 else np.fmax  # both pass over NaN
    of_group = worst.reduce(values, axis=1, keepdims=True)
    of_batch = worst.reduce(values, axis=None)
    rivals = np.where(failed.all(axis=1, keepdims=True), of_batch, of_group)
    return np.where(failed, rivals, values), failed


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

    def pairs(self, places: Iterable[int]) -> tuple[list[Example], list[str]]:
        """Copies of the examples and the texts of some places."""
        # code may empty a list in `fields`, or the messages of a dialogue
        examples = [copy.deepcopy(self.examples[place]) for place in places]
        return examples, [copy.deepcopy(self.texts[place]) for place in places]

    def spread(self, scores: Scores) -> Scores:
        """The scores of all texts, from the scores of the distinct ones."""
        return [scores[number] for number in self.same]


@dataclass(eq=False)
class RewardScorer:
    """Calls the task and the reward functions for a batch of completions."""

    task: Task
    _: KW_ONLY
    # of each reward in the total, others weigh 0; empty: those of task, environments, functions
    weights: Mapping[str, float] = field(default_factory=dict)
    functions: Sequence[RewardFunction] = ()  # beside the task's parts
    # those that give a reward, and their weights
    environments: Mapping[str, float] = field(default_factory=dict)
    workers: int = 1  # calls side by side
    watchdog: Watchdog = UNMARKED  # ends a call that holds Python's lock
    warn: Warn = lambda text: None  # called with the first failure of each function
    tokenizer: Tokenizer | None = None  # the policy's, for functions of tokens
    token_model: Callable[[str], Any] | None = None  # for them: from a name to a frozen model

    def __post_init__(self) -> None:
        self.first_errors: dict[str, str] = {}  # of the functions that have failed
        self.failing = Counter[str]()  # the steps in a row in which they fail throughout
        self.begin_step(math.inf)
        task, functions = self.task, self.functions
        of_functions = {function.name: function.weight for function in functions}
        self.weights = self.weights or {**task.parts, **self.environments, **of_functions}
        self.names = [*task.parts, *self.environments, *of_functions]
        self.text_parts = [name for name in task.parts if name not in task.token_parts]
        self.success = next((f.name for f in functions if f.success), task.success)
        for name in {*self.names, *self.weights} | ({self.success} - {EXACT, REWARD}):
            if self.names.count(name) != 1 or name in RESERVED or not name.isidentifier():
                said = f"needs a word as its name, which one reward has, and not {RESERVED}"
                raise ConfigError(f"reward {name}: {said}; there are: {', '.join(self.names)}")
        for name, weight in self.weights.items():
            check_weight(name, weight)

    def begin_step(self, began: float) -> None:
        """Forget the step before. `began`: when code of others is called first; inf: in `score`."""
        self.began = began
        self.has_failed = False  # any score of this step

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
        self.began = min(self.began, time.monotonic())
        batch = TextBatch(examples, texts)
        scores: dict[str, Scores] = {}

        def tokens() -> TokenBatch:
            """A copy for each function: the loss needs the log-probs as they are."""
            assert completions and self.tokenizer and self.token_model
            copies = copy.deepcopy((examples, texts, completions))
            return TokenBatch(*copies, temperature, self.tokenizer.decode, self.token_model)

        for name in self.environments:
            scores[name] = [getattr(text, "rewards", {}).get(name) for text in batch.texts]
            for text in batch.texts:
                if isinstance(text, Dialogue) and name in text.rewards and text.error:
                    self.first_errors.setdefault(name, text.error)
        if self.task.token_parts:
            by_token = self.task.score_tokens(tokens())
            for name in self.task.token_parts:
                values = np.ravel(by_token[name]).tolist()
                scores[name] = [None if np.isnan(value) else value for value in values]
        if self.text_parts:
            scores |= self._of_task(batch)
        for function in self.functions:
            if function.tokens:
                scores[function.name] = as_numbers(function(tokens()), batch.shape).ravel().tolist()
            else:
                scores[function.name] = self._of_function(function, batch)
        parts: dict[str, np.ndarray] = {}
        failed: dict[str, np.ndarray] = {}
        for name in self.names:
            weight = self.weights.get(name, 1.0)
            parts[name], failed[name] = settled(scores[name], batch.shape, weight)
            self.has_failed |= bool(failed[name].any())
        total = np.zeros(batch.shape)
        for name, weight in self.weights.items():
            # where a reward failed throughout, nobody knows what it would have paid
            unknown = failed[name] & np.isnan(parts[name])
            total += weight * np.where(unknown, np.nan, neutral(parts[name]))
        return RewardTable(total, parts, failed)

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise RunFailed for a reward that fails on all completions, at first or in a row."""
        most = 1 if step == 1 else MOST_FAILING
        for name in self.names:
            has_failed = metrics.get(f"rewards/{name}/failures")
            fails = has_failed and f"rewards/{name}/mean" not in metrics
            self.failing[name] = self.failing[name] + 1 if fails else 0
            if self.failing[name] >= most:
                first = self.first_errors.get(name, "in another process")
                said = f"fails on all completions, {self.failing[name]} steps; first: {first}"
                raise RunFailed(f"reward {name} {said}")

    def _of_task(self, batch: TextBatch) -> dict[str, Scores]:
        """The task's parts of texts."""
        number = len(batch.distinct)
        shares = np.array_split(batch.distinct, min(self.workers, number))
        pieces = [batch.pairs(places) for places in shares]
        if len(pieces) > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                answers = [*pool.map(lambda piece: self.task.score_batch(*piece), pieces)]
        else:  # a single thread would only cost time
            answers = [self.task.score_batch(*piece) for piece in pieces]
        return {
            name: batch.spread(as_scores([x for each in answers for x in each[name]], number))
            for name in self.text_parts
        }

    def _of_function(self, function: RewardFunction, batch: TextBatch) -> Scores:
        """A function's scores of texts."""
        # 1. The places of the texts of each call.
        calls: Sequence[Sequence[int]] = [[place] for place in batch.distinct]
        if function.grouped:
            calls = np.arange(len(batch.texts)).reshape(batch.shape).tolist()
        elif function.batched:
            calls = [batch.distinct]

        # 2. Call it.
        scores: list[float | None] = [math.nan] * len(batch.texts)  # by place
        # a thread that waits for an async function costs little
        size = len(calls) if function.is_async else self.workers
        with closing(Pool(size, self.watchdog)) as pool:
            for number, places in enumerate(calls):
                examples, texts = batch.pairs(places)
                call = partial(function.scores, examples, texts)
                about = f"reward {function.name}: {[x.prompt for x in examples]} -> {texts}"
                # a worker process has a deadline of its own
                timeout_s = math.inf if function.process else function.timeout_s * len(places)
                pool.submit(number, call, timeout_s, about)
            for number, answer, error in pool.all():
                if isinstance(error, RunFailed):  # the run must not go on, whatever the reward is
                    raise error
                places = calls[number]
                for place, score in zip(places, answer or (), strict=False):
                    scores[place] = score
                fails = any(scores[place] != scores[place] for place in places)  # NaN
                if fails and function.name not in self.first_errors:
                    self._note(function.name, error)
        return scores if function.grouped else batch.spread([scores[i] for i in batch.distinct])

    def _note(self, name: str, error: BaseException | None) -> None:
        """Keep the first failure of a function, and warn of it: all of them would flood the log."""
        if error is None:
            error = ValueError("no finite number")
        said = failure(error)
        self.first_errors[name] = said
        self.warn(f"reward {name}: {said}; such completions count as the worst of their group")

"""The scorer: it calls the environments, the task and the reward functions, and adds up scores.

The task is trusted: it has no time limit, and an error in it ends the run.
"""

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ..advantages import neutral
from ..errors import ConfigError, RunFailed
from ..metrics import SAMPLED
from ..runtime.calls import Pool
from ..task import Task, TokenBatch
from ..text.tokenizer import Tokenizer
from ..types import EXACT, REWARD, Completion, Completions, Example, RewardTable, Scores, Warn
from ..userfiles import failure
from .functions import RewardFunction, as_numbers, as_scores

MOST_FAILING = 3  # steps in a row in which a reward fails on all completions
RESERVED = ("step", "n", REWARD)  # keys of eval.jsonl beside the measures


class TextBatch:
    """The texts of a batch by their places 0 to P * G - 1, and which of them are distinct.

    In the groups [a, b, a] and [b, c, b], the distinct texts have the places [0, 1, 3, 4], and
    `same` is [[0, 1, 0], [2, 3, 2]]: examples differ, so b is two texts.
    """

    def __init__(self, examples: Sequence[Example], texts: Sequence[Sequence[Completion]]) -> None:
        self.texts = [text for group in texts for text in group]
        self.examples = [example for example in examples for _ in texts[0]]
        self.places = np.arange(len(self.texts)).reshape(len(texts), -1)
        # dialogues may differ although their last turns are equal
        contents = [id(text) if text.is_dialogue else text for text in self.texts]
        numbers: dict[tuple[int, str | int], int] = {}  # of the distinct texts
        keys = zip(map(id, self.examples), contents, strict=True)
        same = [numbers.setdefault(key, len(numbers)) for key in keys]
        self.distinct = np.unique(same, return_index=True)[1]  # the place of the first of each
        self.same = np.reshape(same, self.places.shape)  # [P, G], the number of each distinct text

    def pairs(self, places: Iterable[int]) -> tuple[list[Example], list[Completion]]:
        """Copies, because code may empty a list in `fields`, or the messages of a text."""
        examples = [copy.deepcopy(self.examples[place]) for place in places]
        return examples, [copy.deepcopy(self.texts[place]) for place in places]


@dataclass(eq=False)
class RewardScorer:
    task: Task
    _: KW_ONLY
    # weights of the rewards in the total, others weigh 0; if empty, each reward has its own weight
    weights: Mapping[str, float] = field(default_factory=dict)
    functions: Sequence[RewardFunction] = ()  # beside the task's rewards
    environments: Mapping[str, float] = field(default_factory=dict)  # weights of their rewards
    workers: int = 1  # calls side by side
    warn: Warn = lambda text: None  # called with the first failure of each function
    tokenizer: Tokenizer | None = None  # the policy's, for functions of tokens
    token_model: Callable[[str], Any] | None = None  # for them: from a name to a frozen model

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that cannot be."""
        self.first_errors: dict[str, str] = {}  # error by reward that has failed
        self.failing = Counter[str]()  # steps in a row in which a reward fails on all completions
        task = self.task
        own_weights = {function.name: function.weight for function in self.functions}
        named = [function.name for function in self.functions]
        self.names = [*task.reward_weights, *self.environments, *named]
        self.weights = self.weights or {**task.reward_weights, **self.environments, **own_weights}
        self.text_rewards = [name for name in task.reward_weights if name not in task.token_rewards]
        successes = [function.name for function in self.functions if function.success]
        if len(successes) > 1:
            raise ConfigError(f"only one reward can say what is right: {' or '.join(successes)}")
        self.success = successes[0] if successes else task.success

        for name in self.names:
            is_taken = name in RESERVED or name.endswith(SAMPLED) or self.names.count(name) > 1
            if is_taken or not name.isidentifier():
                advice = "give it a word of its own as a name, @minigrpo.reward(name=...)"
                raise ConfigError(f"reward {name}: {advice}")
        asked = {*self.weights} | ({self.success} - {EXACT, REWARD})
        for name in asked - {*self.names}:
            there_are = ", ".join(self.names)
            raise ConfigError(f"there is no reward {name}; there are {there_are}")

    @torch.no_grad()
    def score(
        self,
        examples: Sequence[Example],
        texts: Sequence[Sequence[Completion]],
        completions: Completions | None = None,
        temperature: float = 1.0,
    ) -> RewardTable:
        """Score `texts`, `[P][G]`. Only functions of tokens need the `completions` with them."""
        batch = TextBatch(examples, texts)
        shape = batch.places.shape

        def token_batch() -> TokenBatch:
            """A copy for each function, because the loss needs the log-probs as they are."""
            assert completions and self.tokenizer and self.token_model
            copies = copy.deepcopy((examples, texts, completions))
            return TokenBatch(*copies, temperature, self.tokenizer.decode, self.token_model)

        def in_groups(answers: Any) -> Scores:
            flat = np.ravel(answers).tolist()
            return as_scores(flat, batch.places.size).select(batch.places)

        # 1. Environments and the task.
        scores = dict[str, Scores]()
        for name in self.environments:
            scores[name] = in_groups([text.rewards.get(name) for text in batch.texts])
        if self.task.token_rewards:
            for name, answers in self.task.score_tokens(token_batch()).items():
                scores[name] = in_groups(answers)
        if self.text_rewards:
            scores |= self._of_task(batch)

        # 2. Functions.
        for function in self.functions:
            if function.tokens:
                found = in_groups(as_numbers(function(token_batch()), shape))
            else:
                found = self._of_function(function, batch)
            scores[function.name] = found
            largest = found.values.max()
            if function.success and largest > 1:
                advice = "return 1 for a right completion, and give the reward a weight"
                raise RunFailed(f"reward {function.name}, the success, is {largest:g}: {advice}")

        # 3. A dialogue that broke off fails in all rewards that concern it.
        broken = np.array([text.error is not None for text in batch.texts]).reshape(shape)
        table = {name: scores[name].failing(broken) for name in self.names}

        # 4. What failures cost, and the weighted sum.
        return reward_table(table, self.weights, shape)

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise RunFailed for a reward that fails on all completions, at first or in a row."""
        most = 1 if step == 1 else MOST_FAILING
        for name in self.names:
            has_failed = metrics.get(f"rewards/{name}/failures")
            fails = has_failed and f"rewards/{name}/mean" not in metrics
            self.failing[name] = self.failing[name] + 1 if fails else 0
            if self.failing[name] >= most:
                first = self.first_errors.get(name, "in a dialogue or another process")
                when = f"of {self.failing[name]} step(s) in a row"
                raise RunFailed(f"reward {name} fails on all completions {when}; first: {first}")

    def _of_task(self, batch: TextBatch) -> dict[str, Scores]:
        with ThreadPoolExecutor(self.workers) as pool:
            answers = [*pool.map(self.task.score, *batch.pairs(batch.distinct))]
        return {
            name: as_scores([answer[name] for answer in answers], len(answers)).select(batch.same)
            for name in self.text_rewards
        }

    def _of_function(self, function: RewardFunction, batch: TextBatch) -> Scores:
        # 1. The places of the texts of each call, `[calls, texts]`.
        calls = batch.distinct[:, None]
        if function.grouped:
            calls = batch.places
        elif function.batched:
            calls = batch.distinct[None]

        # 2. Call it. A call without an answer has failed for all of its texts.
        size = calls.shape[1]
        scores = [as_scores(np.full(size, np.nan), size)] * len(calls)
        # a thread that waits for an async function costs little
        is_async = inspect.iscoroutinefunction(function.function)
        with closing(Pool(len(calls) if is_async else self.workers)) as pool:
            for number, places in enumerate(calls):
                call = partial(function.scores, *batch.pairs(places))
                # a worker process has a deadline of its own
                timeout_s = math.inf if function.process else function.timeout_s * size
                pool.submit(number, call, timeout_s)
            for number, answer, error in pool.all():
                if isinstance(error, RunFailed):  # the run must not go on, whatever the reward is
                    raise error
                if error is None:
                    scores[number] = answer
                if scores[number].failed.any() and function.name not in self.first_errors:
                    # the first failure alone: all of them would flood the log
                    first = "gave no finite number" if error is None else failure(error)
                    self.first_errors[function.name] = first
                    cost = "such completions count as the worst of their group"
                    self.warn(f"reward {function.name}: {first}; {cost}")
        table = Scores.join(scores).select(batch.places if function.grouped else batch.same)
        concerns_some = table.applies.any(axis=1)
        if not concerns_some.any() or (concerns_some != table.applies.all(axis=1)).any():
            self.warn(f"reward {function.name} is None for a completion: does it lack a return?")
        return table


def settled(scores: Scores, weight: float) -> Scores:
    """`[P, G]` scores in which a failure counts as the worst of its group.

    In a group without any value, it counts as the worst of this process: the group teaches nothing,
    and an evaluation does not leave it out. The worst is the largest value if the weight is
    negative. A failure stays without a value if there is none.
    """
    sign = np.copysign(1.0, weight)
    answers = np.where(scores.known, sign * scores.values, np.inf)
    worst_of_group = answers.min(axis=1, keepdims=True)
    worst = np.where(np.isinf(worst_of_group), answers.min(), worst_of_group)
    replaced = scores.failed & np.isfinite(worst)
    values = np.where(replaced, sign * worst, scores.values)
    return Scores(values, scores.known | replaced, scores.failed)


def reward_table(
    scores: Mapping[str, Scores],
    weights: Mapping[str, float],
    shape: tuple[int, int],
) -> RewardTable:
    """The table of scores, `[P, G]` each, with what failures cost. `weights` says what adds up.

    A total that is not known counts as the worst of its group, or as 0 if none there is known.
    """
    table = {name: settled(each, weights.get(name, 1.0)) for name, each in scores.items()}
    total = np.zeros(shape)
    known = np.ones(shape, dtype=bool)
    teaches = np.ones((shape[0], 1), dtype=bool)
    for name, weight in weights.items():
        if weight:
            total += weight * neutral(table[name])
            # nobody knows what a reward would have given where it failed throughout
            known &= table[name].known | ~table[name].failed
            teaches &= ~table[name].failed.all(axis=1, keepdims=True)
    total = np.where(teaches, total, total.min(axis=1, keepdims=True))
    worst = np.where(known, total, np.inf).min(axis=1, keepdims=True)
    worst_known = np.where(known.any(axis=1, keepdims=True), worst, 0.0)
    total = np.where(known, total, worst_known)
    return RewardTable(total, known, table)

"""Tasks whose examples come from a generator, files or another task, and the examples of steps."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ..task import Task, TokenBatch
from ..types import Example
from .rows import question_of

MOST_STEPS = 2**20  # a longer run may use a number twice


@dataclass(eq=False)
class Generated(Task):
    """A source of examples without end."""

    make: Callable[[int, str], Example]  # a pure function of a number and "train" or "held-out"
    about: str
    speculate: bool = True

    def train(self, number: int) -> Example:
        return self.make(number, "train")

    def held_out(self, number: int) -> Example:
        return self.make(number, "held-out")


class SourceTask(Task):
    """A task whose examples come from a source; a subclass adds `reward_weights` and `score`."""

    def __init__(self, source: Task) -> None:
        """`source` is a generator, or the rows of files (splits.py); its scores are not read."""
        self.source = source
        self.about = source.about
        self.num_held_out = source.num_held_out
        self.num_known = source.num_known
        self.speculate = source.speculate

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Return example `number` of a split of the source as this task asks it."""
        return example

    def train(self, number: int) -> Example:
        return self.ask(self.source.train(number), number, "train")

    def held_out(self, number: int) -> Example:
        return self.ask(self.source.held_out(number), number, "held-out")

    def known(self, number: int) -> Example:
        return self.ask(self.source.known(number), number, "known")


class WrappedTask(SourceTask):
    """A whole task with its rewards; examples get an `index`, the key of their random numbers."""

    def __init__(self, source: Task) -> None:
        super().__init__(source)
        self.reward_weights = source.reward_weights
        self.token_rewards = source.token_rewards
        self.success = source.success
        self.environment = source.environment
        self.tools = source.tools

    def ask(self, example: Example, number: int, split: str) -> Example:
        prompt = example.prompt or question_of(example.messages)
        return replace(example, index=number, prompt=prompt)

    def score(self, example: Example, text: str) -> Mapping[str, float | None]:
        return self.source.score(example, text)

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        return self.source.score_tokens(batch)

    def summaries(self, values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        return self.source.summaries(values)


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, prompts_per_step: int, share: range) -> None:
        self.task = task
        self.prompts_per_step = prompts_per_step
        self.share = share  # the places in a step that belong to this process
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.futures: dict[int, Future[list[Example]]] = {}  # by step

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step. Raises what the task raised."""
        for due in (step, step + 1):  # the next step's are made meanwhile
            if due not in self.futures:
                self.futures[due] = self.thread.submit(self._make, due, self.share)
        return self.futures.pop(step).result()

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for places in the share, with numbers that no step has."""
        unused_step = (attempt + 1) * MOST_STEPS + step
        return self._make(unused_step, [self.share[place] for place in places])

    def _make(self, step: int, places: Sequence[int]) -> list[Example]:
        return [self.task.train(step * self.prompts_per_step + place) for place in places]

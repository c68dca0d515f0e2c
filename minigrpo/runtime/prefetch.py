"""Which examples a step asks; they are made in the background, before a step needs them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

from ..config import Config
from ..task import Task
from ..types import Example
from .distributed import DistContext

STEPS_AHEAD = 2  # the step in work, and the one after it, which is made meanwhile
MOST_STEPS = 2**20  # of a longer run, a number may serve twice


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(
        self, config: Config, task: Task, dist: DistContext, visits: dict[int, list[int]]
    ) -> None:
        """`visits`: those of the learner, to which steps add theirs."""
        self.task, self.per_step = task, config.sampling.prompts_per_step
        self.share = dist.share(self.per_step)
        self.thread = ThreadPoolExecutor(1, "examples")
        self.made: dict[int, Future[list[Example]]] = {}
        self.rest_solved, self.visits = config.sampling.rest_solved, visits
        self.drawn = enumerate(self._draw())

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step; raises what the task raised."""
        if self.rest_solved:
            drawn = next(x for number, x in self.drawn if number == step)
            return [drawn[place] for place in self.share]
        for ahead in range(step, step + STEPS_AHEAD):
            if ahead not in self.made:
                self.made[ahead] = self.thread.submit(self._make, ahead, self.share)
        return self.made.pop(step).result()

    def _draw(self) -> Iterator[list[Example]]:
        """The examples of each step with --rest-solved, from the visits of all steps before it.

        A question that was solved at its last N visits is left out for an epoch, then asked again.
        """
        solved, resting = Counter[str](), dict[str, int]()  # by question: N, and in which epoch
        following, size = map(self.task.train, count()), self.task.num_train
        for step in count(1):
            awake = (x for x in following if resting.get(x.prompt) != x.index // size)
            yield (drawn := [*islice(awake, self.per_step)])
            for x, right in zip(drawn, self.visits[step], strict=True):
                solved[x.prompt] = (solved[x.prompt] + 1) * right
                is_solved = solved[x.prompt] >= self.rest_solved
                resting[x.prompt] = x.index // size + 1 if is_solved else -1

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for some places of the share, from numbers that no regular step uses.

        They do not depend on --max-steps: a run that is resumed with another one goes on as it was.
        """
        return self._make((attempt + 1) * MOST_STEPS + step, [self.share[x] for x in places])

    def _make(self, step: int, places: Sequence[int]) -> list[Example]:
        return [self.task.train(step * self.per_step + place) for place in places]

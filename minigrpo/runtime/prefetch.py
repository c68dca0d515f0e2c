"""Make training examples in the background, before a step needs them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..config import Config
from ..task import Task
from ..types import Example
from .distributed import DistContext

STEPS_AHEAD = 8
MOST_STEPS = 2**20  # of a longer run, a number may serve twice


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, config: Config, dist: DistContext, first_step: int) -> None:
        self.task, self.per_step = task, config.sampling.prompts_per_step
        self.last_step = config.run.max_steps
        self.share = dist.share(self.per_step)
        self.thread = ThreadPoolExecutor(1, "examples")
        self.made: dict[int, Future[list[Example]]] = {}
        self._request(first_step)

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step; raises what the task raised."""
        self._request(step)
        return self.made.pop(step).result()

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for some places of the share, from numbers that no regular step uses.

        They do not depend on --max-steps: a run that is resumed with another one goes on as it was.
        """
        block = (attempt + 1) * MOST_STEPS + step
        return [self.task.train(block * self.per_step + self.share[place]) for place in places]

    def _request(self, step: int) -> None:
        for ahead in range(step, max(step + 1, min(step + STEPS_AHEAD, self.last_step))):
            if ahead not in self.made:
                self.made[ahead] = self.thread.submit(self._make, ahead)

    def _make(self, step: int) -> list[Example]:
        return [self.task.train(step * self.per_step + place) for place in self.share]

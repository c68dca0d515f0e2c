"""Make training examples in the background, before a step needs them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..task import Task
from ..types import Example
from .distributed import DistContext

STEPS_AHEAD = 8
MOST_STEPS = 2**20  # of a longer run, a number may serve twice


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, per_step: int, last_step: int, dist: DistContext) -> None:
        self.task, self.per_step, self.last_step = task, per_step, last_step
        self.share = dist.share(self.per_step)
        self.thread = ThreadPoolExecutor(1, "examples")
        self.made: dict[int, Future[list[Example]]] = {}

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step; raises what the task raised."""
        for ahead in range(step, max(step + 1, min(step + STEPS_AHEAD, self.last_step))):
            if ahead not in self.made:
                self.made[ahead] = self.thread.submit(self._make, ahead, self.share)
        return self.made.pop(step).result()

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for some places of the share, from numbers that no regular step uses.

        They do not depend on --max-steps: a run that is resumed with another one goes on as it was.
        """
        return self._make((attempt + 1) * MOST_STEPS + step, [self.share[x] for x in places])

    def _make(self, step: int, places: Sequence[int]) -> list[Example]:
        return [self.task.train(step * self.per_step + place) for place in places]

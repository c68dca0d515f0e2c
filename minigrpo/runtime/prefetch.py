"""Make training examples in the background, before a step needs them."""

from collections.abc import Sequence

from ..config import Config
from ..types import Example, Task
from .distributed import DistContext
from .pool import Job, WorkerPool

STEPS_AHEAD = 8
MOST_STEPS = 2**20  # of a longer run, a number may serve twice


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, config: Config, dist: DistContext, first_step: int) -> None:
        self.task, self.per_step = task, config.sampling.prompts_per_step
        self.last_step = config.run.max_steps
        self.share = dist.share(self.per_step)
        self.pool = WorkerPool(1, "examples")
        self.jobs: dict[int, Job] = {}
        self._submit(first_step)

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step."""
        self._submit(step)
        examples: list[Example] = self.jobs.pop(step).future.result()
        return examples

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for some places of the share, from numbers that no regular step uses.

        They do not depend on --max-steps: a run that is resumed with another one goes on as it was.
        """
        block = (attempt + 1) * MOST_STEPS + step
        return [self.task.train(block * self.per_step + self.share[place]) for place in places]

    def _submit(self, step: int) -> None:
        for ahead in range(step, min(step + STEPS_AHEAD, self.last_step)):
            if ahead not in self.jobs:
                self.jobs[ahead] = self.pool.submit(self._make, ahead)

    def _make(self, step: int) -> list[Example]:
        return [self.task.train(step * self.per_step + i) for i in self.share]

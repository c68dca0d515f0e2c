"""Which examples a step asks; they are made in the background, before a step needs them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..task import Task
from ..types import Example

MOST_STEPS = 2**20  # of a longer run, a number may serve twice


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, prompts_per_step: int, share: range) -> None:
        """`share`: the places in a step that belong to this process."""
        self.task = task
        self.prompts_per_step = prompts_per_step
        self.share = share
        self.thread = ThreadPoolExecutor(1, "examples")
        self.made: dict[int, Future[list[Example]]] = {}  # by step

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step; raises what the task raised."""
        for due in (step, step + 1):  # the next one is made meanwhile
            if due not in self.made:
                self.made[due] = self.thread.submit(self._make, due, self.share)
        return self.made.pop(step).result()

    def replacements(self, step: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """New examples for places of the share, with numbers of no step, whatever --max-steps."""
        unused_step = (attempt + 1) * MOST_STEPS + step
        return self._make(unused_step, [self.share[place] for place in places])

    def _make(self, step: int, places: Sequence[int]) -> list[Example]:
        return [self.task.train(step * self.prompts_per_step + place) for place in places]

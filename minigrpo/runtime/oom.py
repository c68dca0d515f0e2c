"""When memory runs out: the same in smaller pieces. Neither gradient nor tokens depend on their
size.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class OOMBackoff:
    """How many prompts go through at a time: as many as asked for, and half as many whenever that
    did not fit.
    """

    def __init__(
        self, what: str, flag: str, size: int, warn: Callable[[str], object] = lambda text: None
    ) -> None:
        """`what` is done with `size` prompts, 0 for all that there are; `flag` is what sets it."""
        self.what, self.flag, self.size, self.warn = what, flag, size, warn

    def run(
        self,
        function: Callable[[int], T],
        there_are: int,
        forget: Callable[[], object] = lambda: None,
    ) -> T:
        """`function(size)`, again and again with half the size until it fits; `forget` frees what
        was kept from before.

        Raises torch.OutOfMemoryError if a single prompt does not fit.
        """
        while True:
            size = self.of(there_are)
            try:
                return function(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            # outside of the handler, whose traceback would hold on to what has to be freed
            self.size = size // 2
            self.warn(
                f"{self.what}: out of memory with {size} prompts at a time; from here on "
                f"{self.size} (see {self.flag})"
            )
            forget()
            torch.cuda.empty_cache()

    def of(self, there_are: int) -> int:
        """How many of so many prompts go first."""
        return min(self.size or there_are, there_are)

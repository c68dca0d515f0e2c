"""Retry work in smaller parts when memory runs out.

Tokens do not change, and neither do gradients, except for bnpo, which depends on the micro-batch.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class OOMBackoff:
    """How many prompts go through the model at a time; halved whenever memory runs out."""

    def __init__(
        self, what: str, flag: str, size: int, warn: Callable[[str], object] = lambda text: None
    ) -> None:
        """
        Args:
            what: the work, in words, for the warning.
            flag: the flag that sets `size`.
            size: prompts at a time at first; 0 for all.
        """
        self.what, self.flag, self.size, self.warn = what, flag, size, warn

    def run(
        self, function: Callable[[int], T], total: int, free: Callable[[], object] = lambda: None
    ) -> T:
        """Return `function(size)`, retried with half the size until it fits.

        `free` releases what was kept from earlier calls. Raises torch.OutOfMemoryError if a single
        prompt does not fit.
        """
        while True:
            size = self.size_of(total)
            try:
                return function(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            # outside the handler, whose traceback would keep tensors alive that must be freed
            self.size = size // 2
            self.warn(
                f"{self.what}: out of memory with {size} prompts at a time; "
                f"from here on {self.size} (see {self.flag})"
            )
            free()
            torch.cuda.empty_cache()

    def size_of(self, total: int) -> int:
        """How many of `total` prompts to run at a time."""
        return min(self.size or total, total)

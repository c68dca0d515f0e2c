"""Retry work in smaller parts when memory runs out.

Tokens do not change, and neither do gradients, except for bnpo, which depends on the micro-batch.
"""

import errno
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# Parts of the messages of a plain RuntimeError. Only CUDA's caching allocator has a type of its
# own; a full disk under torch.save is a plain RuntimeError too, and must not match.
MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # torch on a CPU
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "std::bad_alloc",  # C++'s allocator, under torch
    "could not create a memory object",  # oneDNN
    "CUDA error: out of memory",  # the driver, outside of torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device.

    MemoryError includes NumPy's. An OSError counts if the system call had no memory (ENOMEM), not
    if a disk is full (ENOSPC).
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(part in str(error) for part in MESSAGES)


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

        `free` releases what was kept from earlier calls. If a single prompt does not fit, the error
        is raised as it came: see `is_out_of_memory`.
        """
        while True:
            size = self.size_of(total)
            try:
                return function(size)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # outside the handler, whose traceback would keep tensors alive that must be freed
            self.size = size // 2
            self.warn(
                f"{self.what}: out of memory with {size} prompts at a time; "
                f"from here on {self.size} (see {self.flag})"
            )
            free()
            gc.collect()  # a failed backward pass may leave tensors in reference cycles
            torch.cuda.empty_cache()

    def size_of(self, total: int) -> int:
        """How many of `total` prompts to run at a time."""
        return min(self.size or total, total)

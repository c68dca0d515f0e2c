"""--keep-freed-memory: freed memory stays in the process, for the next tensor.

The system's allocator returns large blocks to the kernel at once. The next tensor of that size gets
new pages, and each of them is cleared when it is touched first. With tensors of tens of megabytes,
such as the gradient of a large embedding, that was measured to take a quarter of a step.
"""

import ctypes
from typing import Any

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
LARGEST = 2**31 - 1  # bytes: only larger blocks are still returned


def c_function(name: str) -> Any:
    """A function of the C library, or None if it has none of that name, as without glibc."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # such as on Windows
        return None


def keep_freed_memory() -> None:
    """Keep what is freed from now on, in the whole process, until it ends."""
    if mallopt := c_function("mallopt"):
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, LARGEST)

"""--keep-freed-memory: freed memory stays in the process, for the next tensor.

The system's allocator returns large blocks to the kernel at once. The next tensor of that size gets
new pages, and each of them is cleared when it is touched first. With tensors of tens of megabytes,
such as the gradient of a large embedding, that was measured to take a third of a step.
"""

import ctypes
from functools import cache
from typing import Any

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
KEEP = 2**31 - 1, 2**31 - 1  # bytes: only larger blocks are returned
RETURN = 2**25, 2**26  # what glibc's own rule arrives at once blocks of 32 MiB have been freed
_kept: list[bool] = []  # what `keep_freed_memory` was told last


@cache
def _mallopt() -> Any:
    """The C library's function, or None where there is none: not glibc."""
    try:
        return getattr(ctypes.CDLL(None), "mallopt", None)
    except (OSError, TypeError):  # such as on Windows
        return None


def keep_freed_memory(enabled: bool) -> None:
    """Keep freed memory, in the whole process, or not. Without glibc, nothing changes."""
    mallopt = _mallopt()
    if mallopt is None or enabled == bool(_kept and _kept[0]):
        return
    mmap, trim = KEEP if enabled else RETURN
    mallopt(MMAP_THRESHOLD, mmap)
    mallopt(TRIM_THRESHOLD, trim)
    _kept[:] = [enabled]

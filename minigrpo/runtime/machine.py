"""What this machine does: seconds of a call, memory in use, and how much memory there is."""

import ctypes
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux only
RESET_PEAK = "5"  # written to clear_refs, it resets the peak
LOAD = Path("/proc/loadavg")  # Linux only
LOOKS, LOOK_EVERY_S = 5, 0.01  # at how many threads run
DISTURBED, MOST_CALLS = 2.5, 12
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's; "max" is no limit


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call, after one call that warms up. It waits for the device."""
    return median([_time(function, device) for _ in range(repeats + 1)][1:])


def undisturbed_seconds(
    function: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Mean seconds of a call that nothing else on the machine has held up, after a warm-up call.

    It is the mean because a step adds up many such calls. A call that takes more than DISTURBED
    times as long as the fastest one is made again, up to MOST_CALLS in all.
    """
    times = list[float]()
    kept = list[float]()
    _time(function, device)
    while len(kept) < repeats and len(times) < MOST_CALLS:
        times.append(_time(function, device))
        kept = [taken for taken in times if taken <= DISTURBED * min(times)]
    return mean(kept)


def _time(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


class PeakMemory:
    """The peak of memory in use within a `with`, above what was in use before: `.mib`.

    Counts allocations on a CUDA device. Elsewhere it is the growth of the process's resident
    memory, or NaN on other systems than Linux.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.mib = device, float("nan")
        self.measures = (
            "allocated on the GPU" if device.type == "cuda" else "growth of resident memory"
        )

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device) / 2**20
        elif CLEAR.exists():
            # otherwise allocations that reuse freed memory would not show as growth
            ctypes.CDLL(None).malloc_trim(0)
            CLEAR.write_text(RESET_PEAK)
            self.before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.mib = torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        elif CLEAR.exists():
            self.mib = _resident("VmHWM") - self.before


def memory_in_use(device: torch.device) -> float:
    """MiB in use now: allocated on a CUDA device, else resident (0 if not on Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    return _resident("VmRSS") if STATUS.exists() else 0.0


def _resident(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**10


def running_elsewhere() -> float:
    """How many other threads of the system run, or wait for a core, now; infinity if unknown.

    The load is a mean over a minute, so it also counts what has just ended.
    """
    found = []
    for _ in range(LOOKS):
        try:
            running, _, _ = LOAD.read_text().split()[3].partition("/")
            found.append(int(running) - 1)
        except (OSError, ValueError, IndexError):
            return math.inf
        time.sleep(LOOK_EVERY_S)
    return median(found)


def memory_limit_mib(device: torch.device) -> float:
    """MiB that a process may use at most: of the CUDA device, else of the machine or its limits.

    The limits are those of a container (cgroup) and of the address space (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2**20
    import resource  # not on Windows

    limits = [float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")]
    if CGROUP_LIMIT.exists() and (text := CGROUP_LIMIT.read_text().strip()).isdecimal():
        limits.append(float(text))
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(float(address_space))
    return min(limits) / 2**20

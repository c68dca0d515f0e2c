"""Properties of the machine: name and versions, matmul rate, bandwidth, peak memory."""

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minigrpo.runtime.environment import versions

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux only
RESET_PEAK = "5"  # written to clear_refs, it resets the peak


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call, after one call that warms up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product; float32 has the precision that torch is set to."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ a, device)


def bandwidth(device: torch.device) -> float:
    """Bytes/s of copying a large tensor; a byte that is read and written counts twice."""
    x = torch.ones((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / seconds(lambda: y.copy_(x), device)


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


def describe_machine(device: torch.device) -> dict[str, Any]:
    found = versions(1) | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})
    return {"device": device_name(device), "versions": found, "cpu_count": os.cpu_count()}


def made_by(command: str) -> str:
    """The line that names a figure's command and commit; docs/check_figures.py reads such lines."""
    commit = versions(1)["git_commit"][:7]
    changes = ["git", "-C", str(Path(__file__).parent), "status", "--porcelain", "-uno"]
    if commit == "unknown":
        return f"Made by `{command}`, commit unknown."
    changed = subprocess.run(changes, capture_output=True, text=True).stdout.strip()
    return f"Made by `{command}` at {commit}{' with local changes' if changed else ''}."

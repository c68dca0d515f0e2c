"""What a machine is and can do, for benchmarks: names and versions, matmul rate, bandwidth, peak
memory, energy.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minigrpo.runtime.run_dir import versions

STATUS, CLEAR, PEAK = (
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
    "5",
)  # Linux: 5 resets the peak
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


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
    """Median of some runs after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product, in the precision that float32 products have just now."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ a, device)


def bandwidth(device: torch.device) -> float:
    """Bytes/s of reading a large tensor and writing it elsewhere, both counted."""
    x = torch.ones((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / seconds(lambda: y.copy_(x), device)


class PeakMemory:
    """The most memory that something took, above what was in use before it: `with
    PeakMemory(device) as peak: ...`, peak.mib.

    Allocated on the CUDA device; elsewhere the growth of the process's resident memory, on Linux
    only.
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
            ctypes.CDLL(None).malloc_trim(0)  # what was freed must not hide what comes
            CLEAR.write_text(PEAK)
            self.before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.mib = torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        elif CLEAR.exists():
            self.mib = _resident("VmHWM") - self.before


def memory_in_use(device: torch.device) -> float:
    """MiB, now: allocated on the CUDA device, else resident (Linux only, elsewhere 0)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    return _resident("VmRSS") if STATUS.exists() else 0.0


def _resident(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**10


def energy_joules(device: torch.device) -> float | None:
    """A counter that only grows, where the device has one that may be read."""
    try:
        if device.type == "cuda":
            import pynvml  # type: ignore[import-not-found]

            pynvml.nvmlInit()
            # not by index: the library does not know which devices are visible here
            handle = pynvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            )
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        return int(RAPL.read_text()) / 1e6
    except Exception:  # no such library, no such counter, no right to read it
        return None


def describe_machine(device: torch.device) -> dict[str, Any]:
    found = versions(1) | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})
    return {"device": device_name(device), "versions": found, "cpu_count": os.cpu_count()}

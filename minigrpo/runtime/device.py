"""Device and precision, and measures of a step's time and memory."""

import ctypes
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..settings import RunConfig, SpeedConfig
from ..types import ConfigError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of --device. With auto or cuda, each local process has its own CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device {name}: this machine does not have {device}")
        torch.cuda.set_device(device)  # the default for code that names no device
        # cuDNN's attention builds a plan for each new length, and lengths differ in every batch
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def set_up_process(speed: SpeedConfig, device: torch.device) -> None:
    """Set what holds for the whole process: --use-tf32, and on a CPU to keep freed memory.

    The allocator would return large blocks to the kernel at once, which clears each page of the
    next tensor when it is first touched. With large embeddings that took a quarter of a step.
    """
    torch.set_float32_matmul_precision("high" if speed.use_tf32 else "highest")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and device.type == "cpu":  # glibc has it, other C libraries may not
        for threshold in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            mallopt(threshold, 2**31 - 1)  # bytes: only larger blocks are still returned


def autocast(speed: SpeedConfig, device: torch.device, keeps_casts: bool = True) -> torch.autocast:
    """--use-amp: matrix products in --amp-dtype; weights, moments, log-softmax in float32.

    The casts of weights may be kept to the end of the context, for further products with them.
    """
    return torch.autocast(device.type, product_dtype(speed), speed.use_amp, keeps_casts)


def product_dtype(speed: SpeedConfig) -> torch.dtype:
    return getattr(torch, speed.amp_dtype if speed.use_amp else "float32")


class PhaseTimer:
    """Seconds per phase of a step; on a GPU a phase ends with a device sync."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds


def memory_mib(device: torch.device) -> dict[str, float]:
    """The peaks so far: allocated and reserved on the CUDA device, else resident in the process.

    Memory that is reserved but not allocated is in gaps that no other allocation fits into.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
        reserved = torch.cuda.max_memory_reserved(device) / 2**20
        return {"peak": peak, "reserved": reserved}
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def profiler(run: RunConfig, folder: Path, is_main: bool) -> torch.profiler.profile:
    """--profile: a trace of the 4th to 6th step of the main process, in the run's folder."""
    begin = 0 if run.profile and is_main else sys.maxsize
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(skip_first=begin, wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder / "profile")),
    )

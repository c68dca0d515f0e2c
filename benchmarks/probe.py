"""Properties of the machine: name and versions, matmul rate, bandwidth, peak memory."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from minigrpo.model.linear import linear
from minigrpo.runtime.environment import versions
from minigrpo.runtime.machine import PeakMemory, memory_in_use, seconds, synchronize

__all__ = ["PeakMemory", "memory_in_use", "seconds", "synchronize"]  # shared with the plan


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product; in float32, as the library computes it."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: linear(a, a), device)


def bandwidth(device: torch.device) -> float:
    """Bytes/s of copying a large tensor; a byte that is read and written counts twice."""
    x = torch.ones((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / seconds(lambda: y.copy_(x), device)


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

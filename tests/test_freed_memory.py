"""--keep-freed-memory: whether a tensor's pages are new is counted by the kernel."""

import subprocess
import sys

import pytest
import torch

from minigrpo import Config
from minigrpo.runtime import accel
from minigrpo.runtime.freed_memory import _mallopt, keep_freed_memory

pytestmark = pytest.mark.skipif(_mallopt() is None, reason="this C library has no mallopt")

COUNT = """
import resource, sys, torch
from minigrpo.runtime.freed_memory import keep_freed_memory

for word in sys.argv[1:]:
    keep_freed_memory(word == "keep")
    faults = []
    for _ in range(16):  # the allocator takes a few to find a place
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(3 * 2**24)  # 192 MiB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(min(faults))
"""


def faults(*words: str) -> list[int]:
    """The fewest page faults of a tensor of 192 MiB, in turn with and without."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_a_tensor_gets_the_pages_of_the_last_one_or_new_ones() -> None:
    kept, returned, again = faults("keep", "return", "keep")
    assert returned > 90  # huge pages of 2 MiB, or 49,152 small ones
    assert max(kept, again) < returned / 2
    assert faults("return") == [pytest.approx(returned, abs=1000)]


def test_the_flag_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[bool]()
    monkeypatch.setattr(accel, "keep_freed_memory", told.append)
    for device, enabled in (("cpu", True), ("cpu", False), ("meta", True)):
        speed = Config.of(keep_freed_memory=enabled).speed
        accel.set_up_process(speed, torch.device(device))
    assert told == [True, False, False]


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigrpo.runtime.freed_memory._mallopt", lambda: None)
    keep_freed_memory(True)

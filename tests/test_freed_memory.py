"""--keep-freed-memory: whether a tensor's pages are new is counted by the kernel."""

import subprocess
import sys

import pytest
import torch

from minigrpo import Config
from minigrpo.runtime import accel, freed_memory

COUNT = """
import resource, sys, torch
from minigrpo.runtime.freed_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
faults = []
for _ in range(16):  # the allocator takes a few to find a place
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(3 * 2**24)  # 192 MiB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


def fewest_faults(word: str) -> int:
    """Page faults of a tensor of 192 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, word], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not freed_memory.c_function("mallopt"), reason="the C library is not glibc")
def test_a_tensor_gets_the_pages_of_the_last_one_or_new_ones() -> None:
    returned = fewest_faults("return")
    assert returned > 90  # huge pages of 2 MiB, or 49,152 small ones
    assert fewest_faults("keep") < returned / 2


def test_the_flag_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[None]()
    monkeypatch.setattr(accel, "keep_freed_memory", lambda: told.append(None))
    for device, enabled, count in (("cpu", True, 1), ("cpu", False, 1), ("meta", True, 1)):
        speed = Config.of(keep_freed_memory=enabled).speed
        accel.set_up_process(speed, torch.device(device))
        assert len(told) == count


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "c_function", lambda name: None)
    freed_memory.keep_freed_memory()

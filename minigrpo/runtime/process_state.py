"""Keep what users' code does to the process from changing the whole run.

`torch.set_default_dtype(torch.float64)` at the top of a reward file would train another model in
another precision, and `torch.set_grad_enabled(False)` would train nothing, both without a word.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

Warn = Callable[[str], object]


def _current_folder() -> str:
    """The current folder, or "" if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _change_folder(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _set_autocast(kind: str, kept: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(kind, kept[0])
    torch.set_autocast_dtype(kind, kept[1])


def _set_device(device: torch.device) -> None:
    """Set torch's default device; the CPU is what no device means, which costs nothing per call."""
    torch.set_default_device(None if device.type == "cpu" else device)


# what the warning calls it -> how to read it, and how to set it
STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, _set_device),
    "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    **{
        f"torch's autocast on {kind}": (partial(_autocast, kind), partial(_set_autocast, kind))
        for kind in ("cpu", "cuda")
    },
    "torch's matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch's anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "numpy's handling of errors": (np.geterr, lambda kept: np.seterr(**kept)),
    "Python's recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the current folder": (_current_folder, _change_folder),
}


class KeptState:
    """The values of `STATE` at one moment, to go back to."""

    def __init__(self) -> None:
        self.values = {name: read() for name, (read, _) in STATE.items()}
        self.said = False

    def restore(self) -> list[str]:
        """Go back to the values, and return the names of those that had changed."""
        changed = [name for name, (read, _) in STATE.items() if read() != self.values[name]]
        for name in changed:
            STATE[name][1](self.values[name])
        return changed

    def undo(self, warn: Warn) -> None:
        """Go back to the values, and warn the first time that it was needed."""
        if (changed := self.restore()) and not self.said:
            self.said = True
            warn(
                f"the task or a reward changes {', '.join(changed)} for the whole run; undone "
                "after each batch. Such code should undo its changes itself"
            )


@contextmanager
def state_kept(where: str, warn: Warn) -> Iterator[None]:
    """Undo what the code in this context does to `STATE`, with one warning that names it.

    Args:
        where: how the warning begins: the flag and the file.
    """
    before = KeptState()
    try:
        yield
    finally:
        if changed := before.restore():
            warn(
                f"{where}: changes {', '.join(changed)} for the whole run when it is imported; "
                "undone. Change such things inside the functions that need them"
            )

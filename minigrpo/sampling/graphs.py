"""Rounds of decoding as CUDA graphs.

A round launches over a thousand kernels, which takes the host longer than the GPU needs to run
them. A graph launches all at once, on the same places in memory. So the tables, the caches and the
layouts of sampling/ never move, and a round is padded to one of few sizes with a graph each.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..model.packing import to_device

Action = Callable[[], object]


def next_size(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..: few in number, and at most half more."""
    power = 1 << max(0, size - 1).bit_length()
    between = power // 4 * 3
    return between if size <= between else power


def copy_into(buffer: Tensor, arrays: Sequence[np.ndarray]) -> Sequence[Tensor]:
    """Put arrays into a buffer, one after another, in one copy. Returns the place of each in it."""
    joined = to_device(np.concatenate(arrays), buffer.device)
    used = buffer[: len(joined)]
    used.copy_(joined)
    return used.split([len(array) for array in arrays])


def copy_rows(caches: Sequence[Tensor], sources: np.ndarray, targets: np.ndarray, dim: int) -> None:
    """Copy rows of each cache to other rows; all are read before any is written."""
    if caches and len(targets):
        rows = to_device(np.stack([sources, targets]), caches[0].device)
        for cache in caches:
            cache.index_copy_(dim, rows[1], cache.index_select(dim, rows[0]))


def capturing() -> Callable[[Action], Action]:
    """A function that runs a round on the current CUDA device, and returns what runs it again."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def capture(run_round: Action) -> Action:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # torch.cuda.graph would return all free memory to the driver first
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run_round()
            finally:
                graph.capture_end()
        graph.replay()
        return graph.replay

    return capture


class RoundGraphs:
    """Runs the first round of each size kernel by kernel, captures the second, replays others."""

    def __init__(self, capture: Callable[[Action], Action]) -> None:
        self.capture = capture
        self.begun = set[Hashable]()
        self.replays = dict[Hashable, Action]()

    def run(self, size: Hashable, run_round: Action) -> None:
        """Run a round of a size; `run_round` always does the same on the same places in memory."""
        if size in self.replays:
            self.replays[size]()
        elif size in self.begun:
            self.replays[size] = self.capture(run_round)
        else:
            self.begun.add(size)
            run_round()

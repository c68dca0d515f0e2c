"""Rounds of decoding as CUDA graphs.

A round launches over a thousand kernels, which takes the host longer than the GPU needs to run
them. A graph launches all of them at once. It repeats the same kernels on the same places in
memory. So in sampling/ the tables, the caches and what says where everything lies stay where they
are, and a round is padded to few sizes, each of which has a graph of its own.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

Action = Callable[[], object]


def next_size(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..: at most half more, few in number."""
    power = 1 << max(0, size - 1).bit_length()
    between = power // 4 * 3
    return between if size <= between else power


def copy_into(buffer: Tensor, parts: Sequence[np.ndarray]) -> Sequence[Tensor]:
    """Put arrays into a buffer, one after another, in one copy; the place of each in it."""
    joined = torch.from_numpy(np.concatenate(parts))
    used = buffer[: len(joined)]
    used.copy_(joined)
    return used.split([len(part) for part in parts])


def capturing() -> Callable[[Action], Action]:
    """A function that runs a round on the current CUDA device, and returns what runs it again."""
    pool = torch.cuda.graph_pool_handle()

    def capture(round: Action) -> Action:
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate pinned memory meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            round()
        graph.replay()
        return graph.replay

    return capture


class RoundGraphs:
    """The first round of each size runs kernel by kernel, the second is captured, others replay."""

    def __init__(self, capture: Callable[[Action], Action]) -> None:
        self.capture = capture
        self.begun = set[Hashable]()
        self.replays = dict[Hashable, Action]()

    def run(self, size: Hashable, round: Action) -> None:
        """Run a round of a size; `round` always does the same on the same places in memory."""
        if size in self.replays:
            self.replays[size]()
        elif size in self.begun:
            self.replays[size] = self.capture(round)
        else:
            self.begun.add(size)
            round()

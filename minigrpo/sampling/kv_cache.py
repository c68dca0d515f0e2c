"""The KV cache, which grows with what is decoded; its decoder decides what its columns mean."""

import itertools

import numpy as np
import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]

# Columns by which a cache grows, by type of device. Elsewhere the longest case is allocated at
# once: a CPU's memory is taken page by page when it is written, and growing, which copies the
# cache, had a higher peak.
BLOCK = {"cuda": 128}


class KVCache:
    """One pair of tensors `[capacity, K, length, E]` per layer; slot b is row b.

    One tensor for all layers would need fewer operations, but was measured to take more memory: the
    cache is allocated in each rollout, and the memory that the last update freed is too fragmented
    for one block of that size.
    """

    def __init__(self) -> None:
        self.pairs: list[KeysAndValues] = []
        self.capacity, self.length = 0, 0
        self.num_columns = 0  # in use; memory beyond them is uninitialised

    def resize(self, capacity: int, length: int) -> None:
        """Move to tensors of `capacity` slots and `length` columns.

        Slots from `capacity` on are lost, and so are columns that are not in use.
        """
        self.capacity, self.length = capacity, length
        # one layer after the other, so that no more than one exists twice
        for layer in range(len(self.pairs)):
            k, v = self.pairs[layer]
            self.pairs[layer] = self._resized(k), self._resized(v)

    def _resized(self, cache: Tensor) -> Tensor:
        new = cache.new_empty(self.capacity, cache.shape[1], self.length, cache.shape[3])
        slots = min(len(cache), self.capacity)
        new[:slots, :, : self.num_columns] = cache[:slots, :, : self.num_columns]
        return new

    def write_prompt(self, layer: int, k: Tensor, v: Tensor, first: int) -> None:
        """Write prompts `[B, K, Lp, E]` into the first columns of slots `first` to first + B - 1.

        Their other columns in use are filled with zeros: see `extend`.
        """
        if layer == len(self.pairs):
            shape = self.capacity, k.shape[1], self.length, k.shape[3]
            self.pairs.append((k.new_empty(shape), v.new_empty(shape)))
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            slots, width = cache[first : first + len(new)], new.shape[2]
            slots[:, :, :width] = new
            slots[:, :, width : self.num_columns] = 0

    def extend(self, num_slots: int, num_columns: int) -> None:
        """Let the slots use `num_columns` columns, of which new ones are filled with zeros.

        Attention masks the columns that a slot has not written, but uninitialised memory may hold
        NaN, and a masked weight of 0 times NaN is NaN.
        """
        for cache in itertools.chain(*self.pairs):
            cache[:num_slots, :, self.num_columns : num_columns] = 0
        self.num_columns = num_columns

    def write(
        self, layer: int, k: Tensor, v: Tensor, slots: Tensor, columns: Tensor, num_slots: int
    ) -> KeysAndValues:
        """Write `k` and `v`, `[M, K, E]`, into `slots [M]` at `columns [M]`.

        Returns:
            All keys and values in use of the first `num_slots`, `[B, K, num_columns, E]` each.
        """
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            cache[slots, :, columns] = new
        keys, values = (cache[:num_slots, :, : self.num_columns] for cache in self.pairs[layer])
        return keys, values

    def reorder(self, sources: np.ndarray) -> None:
        """Slot i continues the former slot `sources[i]`; slots that stay are not copied."""
        moved = np.flatnonzero(sources != np.arange(len(sources)))
        if not len(moved):
            return
        device = self.pairs[0][0].device
        to, source = (torch.from_numpy(x).to(device) for x in (moved, sources[moved]))
        for cache in itertools.chain(*self.pairs):
            used = cache[:, :, : self.num_columns]
            # all sources are read before any slot is overwritten
            used.index_copy_(0, to, used.index_select(0, source))

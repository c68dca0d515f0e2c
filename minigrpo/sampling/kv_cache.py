"""The preallocated KV cache; the decoder that uses it decides what its columns mean."""

import itertools

import numpy as np
import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]


class KVCache:
    """One pair of tensors `[capacity, K, length, E]` per layer; slot b is row b.

    One tensor for all layers would need fewer operations, but was measured to take more memory: the
    cache is allocated in each rollout, and the memory that the last update freed is too fragmented
    for one block of that size.
    """

    def __init__(self) -> None:
        self.pairs: list[KeysAndValues] = []
        self.num_columns = 0  # in use; memory beyond them is uninitialised

    def write_prompt(self, layer: int, k: Tensor, v: Tensor, *, capacity: int, length: int) -> None:
        """Write the prompts `[B, K, Lp, E]` into the first columns of slots 0 to B - 1.

        The first call for a layer allocates `capacity` slots of `length` columns.
        """
        if layer == len(self.pairs):
            shape = capacity, k.shape[1], length, k.shape[3]
            self.pairs.append((k.new_empty(shape), v.new_empty(shape)))
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            cache[: len(new), :, : new.shape[2]] = new
        self.num_columns = k.shape[2]

    def extend(self, num_slots: int, num_columns: int) -> None:
        """Bring the columns up to `num_columns` into use, filled with zeros.

        Attention masks the columns that a slot has not written, but uninitialised memory may hold
        NaN, and a masked weight of 0 times NaN is NaN.
        """
        for cache in itertools.chain(*self.pairs):
            cache[:num_slots, :, self.num_columns : num_columns] = 0
        self.num_columns = num_columns

    def write(self, layer: int, k: Tensor, v: Tensor, columns: Tensor) -> KeysAndValues:
        """Write `k` and `v`, `[B, W, K, E]`, at `columns [B, W]`.

        Returns:
            All keys and values in use of the B slots, `[B, K, num_columns, E]` each.
        """
        slots = torch.arange(len(columns), device=columns.device)[:, None]
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            cache[slots, :, columns] = new
        keys, values = (cache[: len(columns), :, : self.num_columns] for cache in self.pairs[layer])
        return keys, values

    def grow(self, capacity: int) -> None:
        """Move the cache to tensors of `capacity` slots."""
        self.pairs = [(self._grown(k, capacity), self._grown(v, capacity)) for k, v in self.pairs]

    def _grown(self, cache: Tensor, capacity: int) -> Tensor:
        new = cache.new_empty(capacity, *cache.shape[1:])
        new[: len(cache), :, : self.num_columns] = cache[:, :, : self.num_columns]
        return new

    def reorder(self, sources: np.ndarray) -> None:
        """Slot i continues the former slot `sources[i]`; slots that stay are not copied."""
        capacity = len(self.pairs[0][0])
        if len(sources) > capacity:
            self.grow(max(len(sources), 2 * capacity))
        moved = np.flatnonzero(sources != np.arange(len(sources)))
        if not len(moved):
            return
        device = self.pairs[0][0].device
        to, source = (torch.from_numpy(x).to(device) for x in (moved, sources[moved]))
        for cache in itertools.chain(*self.pairs):
            used = cache[:, :, : self.num_columns]
            # all sources are read before any slot is overwritten
            used.index_copy_(0, to, used.index_select(0, source))

"""Decoding with CUDA graphs: each round is captured once per shape, then replayed in one launch.

A CUDA graph needs the same memory and the same shapes in every replay. So the KV cache outlives a
rollout, and the numbers of slots and columns are rounded up; surplus slots compute garbage that is
never read. Results are those of `ReplicatedPrefixDecoder`. On a CPU, where there is nothing
to capture, the same code runs every round: slower, but tests can cover it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..model.transformer import Transformer
from .decoders import ReplicatedPrefixDecoder
from .kv_cache import KVCache
from .slots import round_up_window

SLOT_MULTIPLE, COLUMN_MULTIPLE = 16, 32  # numbers of slots and columns are rounded up to these


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class CUDAGraphCache:
    """What rollouts share: the KV cache, and the captured rounds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Free all memory, the pool included: it must not be used once its graphs are gone."""
        self.cache = KVCache()
        self.model_key = tuple[object, ...]()
        self.drop_captured()

    def drop_captured(self) -> None:
        """Drop the captured rounds, and keep the KV cache."""
        self.captured: dict[tuple[int, ...], CapturedStep] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # used for capture
        self.output: Tensor | None = None

    def output_like(self, logits: Tensor) -> Tensor:
        """A buffer for the output of a round.

        All rounds can share it, because each output is read before the next round runs.
        """
        if self.output is None or self.output.numel() < logits.numel():
            # rounds captured earlier keep their smaller buffer
            self.output = logits.new_empty(logits.numel())
        return self.output[: logits.numel()].view(logits.shape)

    def prepare(self, model_key: tuple[object, ...]) -> None:
        """Reset everything if rounds were captured with another model or another precision."""
        if model_key != self.model_key:
            self.reset()
            self.model_key = model_key

    def decoder(self, model: Transformer, length: int) -> "GraphedDecoder":
        """A decoder that uses this cache; the arguments are those of CachedDecoder."""
        return GraphedDecoder(self, model, length)


class CapturedStep:
    """One captured round. Its input and output tensors never move."""

    def __init__(
        self,
        tokens: Tensor,
        positions: Tensor,
        run: Callable[[Tensor, Tensor], Tensor],
        graphs: CUDAGraphCache,
    ) -> None:
        """Capture `run(tokens [B, W], positions [B, W]) -> logits [B * W, V]`."""
        self.tokens, self.positions = tokens.clone(), positions.clone()
        kind, call = tokens.device.type, lambda: run(self.tokens, self.positions)
        # Disable autocast's cache of cast weights: a replay would read casts from the time of the
        # capture, after the weights have changed and the casts' memory has been freed.
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            if kind == "cuda":
                self.replay: Callable[[], object] = self._capture(call, graphs)
            else:
                self.logits = graphs.output_like(call())
                self.replay = lambda: self.logits.copy_(call())

    def _capture(self, call: Callable[[], Tensor], graphs: CUDAGraphCache) -> Callable[[], object]:
        device = self.tokens.device
        graphs.pool = graphs.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            stream = graphs.stream = graphs.stream or torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # A warm-up outside the capture, in which libraries initialise. Its writes to the
                # cache are harmless: the replay writes the same keys and values.
                logits = call()
            torch.cuda.current_stream(device).wait_stream(stream)
            self.logits = graphs.output_like(logits)
            del logits
            graph = torch.cuda.CUDAGraph()
            # thread_local: reward functions in other threads may use the device during capture
            with torch.cuda.graph(
                graph, pool=graphs.pool, stream=stream, capture_error_mode="thread_local"
            ):
                self.logits.copy_(call())
        return graph.replay

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.replay()
        return self.logits


class GraphedDecoder(ReplicatedPrefixDecoder):
    """A `ReplicatedPrefixDecoder` whose rounds are captured and replayed."""

    def __init__(self, graphs: CUDAGraphCache, model: Transformer, length: int) -> None:
        super().__init__(model, length)
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        graphs.prepare((id(model), dtype))
        self.graphs, self.cache = graphs, graphs.cache
        self.cache.num_columns = 0  # what earlier rollouts wrote is not read

    def _resize(self, capacity: int, length: int) -> None:
        """Make room for the longest completion at once, and give nothing back.

        A cache that moves has another address, so captured rounds would use freed memory.
        """
        self.graphs.drop_captured()
        longest = self._cache_columns(self.length)
        capacity = max(self.cache.capacity, round_up(capacity, SLOT_MULTIPLE))
        self.cache.resize(capacity, max(self.cache.length, longest))

    def _cache_columns(self, num_columns: int) -> int:
        return round_up(super()._cache_columns(num_columns), COLUMN_MULTIPLE)

    def step(
        self, tokens: Tensor, columns: Tensor, num_columns: int, counts: np.ndarray | None = None
    ) -> Tensor:
        """As in CachedDecoder, with W rounded up: `generate` leaves columns for it."""
        num_tokens = tokens.shape[1]
        more = round_up_window(num_tokens) - num_tokens
        if more and counts is None:
            counts = np.full(len(tokens), num_tokens)
        num_columns = min(num_columns + more, self.length)
        return super().step(pad(tokens, (0, more)), columns, num_columns, counts)

    def _run(
        self, tokens: Tensor, positions: Tensor, ragged: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Always runs all W tokens of each slot, so that few shapes are captured."""
        num_slots, num_columns = round_up(len(tokens), SLOT_MULTIPLE), self.cache.num_columns
        key = (num_slots, tokens.shape[1], num_columns)
        # surplus slots write to the first columns of cache rows that no sequence uses
        surplus = (0, 0, 0, num_slots - len(tokens))
        tokens, positions = pad(tokens, surplus), pad(positions, surplus)

        def run(tokens: Tensor, positions: Tensor) -> Tensor:
            return super(GraphedDecoder, self)._run(tokens, positions, None)

        if key not in self.graphs.captured:
            self.graphs.captured[key] = CapturedStep(tokens, positions, run, self.graphs)
        logits = self.graphs.captured[key](tokens, positions)
        return logits[: self.num_slots * tokens.shape[1]] if ragged is None else logits[ragged[1]]

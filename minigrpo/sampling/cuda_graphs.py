"""Decoding under CUDA graphs: a round of the cached decoder is recorded once per shape and then
replayed as one launch.

CUDAGraphCache want the same memory and the same shapes every time. So the cache outlives a rollout, the
number of slots is rounded up (what is too many computes garbage into places that nobody reads), and
so is the number of columns. The numbers are those of `ReplicatedPrefixDecoder`. Off CUDA the same code runs
its rounds instead of replaying them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..model.transformer import Transformer
from .decoders import KVCache, ReplicatedPrefixDecoder

SLOTS, COLUMNS = 16, 32  # rounded up to multiples of these


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class CUDAGraphCache:
    """What stays from rollout to rollout: the cache, and the recorded rounds."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Give all memory back. A pool whose graphs are gone must not be used again either."""
        self.cache, self.shape, self.of = KVCache(), (0, 0), tuple[object, ...]()
        self.reset_steps()

    def reset_steps(self) -> None:
        self.rounds: dict[tuple[int, ...], CapturedStep] = {}
        self.pool: object = None
        self.side: torch.cuda.Stream | None = None  # what is recorded is recorded there
        self.output: Tensor | None = None

    def room_for(self, logits: Tensor) -> Tensor:
        """The output of a round, in memory that all share: each is read before the next one
        runs."""
        if self.output is None or self.output.numel() < logits.numel():
            self.output = logits.new_empty(
                logits.numel()
            )  # rounds recorded before go on with what they have
        return self.output[: logits.numel()].view(logits.shape)

    def fit(self, slots: int, columns: int, of: tuple[object, ...]) -> None:
        """Forget what there is not room in, or what was recorded `of` another model or
        precision."""
        shape = max(slots, self.shape[0]), max(columns, self.shape[1])
        if of != self.of or shape != self.shape:
            self.forget()
            self.shape, self.of = shape, of

    def decoder(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> "GraphedDecoder":
        return GraphedDecoder(self, model, prompt_ids, prompt_len, num_samples, length)


class CapturedStep:
    """One recorded round: its inputs and its output stay where they are."""

    def __init__(
        self,
        tokens: Tensor,
        positions: Tensor,
        run: Callable[[Tensor, Tensor], Tensor],
        graphs: CUDAGraphCache,
    ) -> None:
        self.tokens, self.positions = tokens.clone(), positions.clone()
        device, call = tokens.device, lambda: run(self.tokens, self.positions)
        # autocast must not remember a weight that it cast before the recording: the weights change,
        # the memory goes
        low = torch.is_autocast_enabled(device.type)
        with torch.autocast(
            device.type, torch.get_autocast_dtype(device.type), enabled=low, cache_enabled=False
        ):
            if device.type == "cuda":
                graphs.pool = graphs.pool or torch.cuda.graph_pool_handle()
                with torch.cuda.device(device):
                    side = graphs.side = graphs.side or torch.cuda.Stream(device)
                    side.wait_stream(torch.cuda.current_stream(device))
                    with torch.cuda.stream(side):
                        logits = (
                            call()
                        )  # libraries set themselves up; what is written is what is written again
                    torch.cuda.current_stream(device).wait_stream(side)
                    self.logits = graphs.room_for(logits)
                    del logits
                    graph = torch.cuda.CUDAGraph()
                    # thread_local: rewards in other threads may use the device meanwhile
                    options: dict[str, Any] = {
                        "pool": graphs.pool,
                        "stream": side,
                        "capture_error_mode": "thread_local",
                    }
                    with torch.cuda.graph(graph, **options):
                        self.logits.copy_(call())
                self.replay: Callable[[], object] = graph.replay
            else:
                self.logits = graphs.room_for(call())
                self.replay = lambda: self.logits.copy_(call())

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.replay()
        return self.logits


class GraphedDecoder(ReplicatedPrefixDecoder):
    """`ReplicatedPrefixDecoder` whose rounds are recorded."""

    def __init__(
        self,
        graphs: CUDAGraphCache,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> None:
        super().__init__(model, prompt_ids, prompt_len, num_samples, length)
        kind = model.device.type
        of = (
            id(model),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )
        graphs.fit(up(self.num_slots, SLOTS), up(self.prompt_ids.shape[1] + length, COLUMNS), of)
        self.graphs, self.cache = graphs, graphs.cache

    def _remember(self, number: int, k: Tensor, v: Tensor) -> None:
        room, length = self.graphs.shape
        self.cache.begin(number, k[self.prompt], v[self.prompt], room=room, length=length)

    def keep(self, slots: np.ndarray) -> None:
        if len(slots) > (
            room := self.graphs.shape[0]
        ):  # more room is other memory: what was recorded is void
            self.graphs.reset_steps()
            more = up(max(len(slots), 2 * room), SLOTS)
            self.cache.make_room(more)
            self.graphs.shape = more, self.graphs.shape[1]
        super().keep(slots)

    def _columns_in_use(self) -> int:
        return min(up(self.prompt_ids.shape[1] + self.num_columns, COLUMNS), self.graphs.shape[1])

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        slots, columns = up(len(tokens), SLOTS), self.num_columns
        key = (slots, tokens.shape[1], self._columns_in_use())
        # a slot too many writes into its own place, at its first columns
        tokens, positions = (
            torch.nn.functional.pad(x, (0, 0, 0, slots - len(x))) for x in (tokens, positions)
        )

        def run(tokens: Tensor, positions: Tensor) -> Tensor:
            self.num_columns = columns
            return super(GraphedDecoder, self)._run(tokens, positions)

        if key not in self.graphs.rounds:
            self.graphs.rounds[key] = CapturedStep(tokens, positions, run, self.graphs)
        return self.graphs.rounds[key](tokens, positions)[: self.num_slots]

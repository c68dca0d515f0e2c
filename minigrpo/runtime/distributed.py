"""Communication between the processes of a run; with one process, there is none.

All processes call the same methods in the same order.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..errors import ConfigError, RunFailed, error_text

T = TypeVar("T")
COUNTED = ("/tokens", "/failures")  # endings of metrics that are summed, not averaged
TIMEOUT = timedelta(minutes=10)  # time limit of a collective


@dataclass(frozen=True)
class DistContext:
    """One process among `world_size`."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    patient: dist.ProcessGroup | None = None  # all processes, when they may wait days for one

    @classmethod
    def from_env(cls) -> "DistContext":
        """Join the processes that torchrun started. Without torchrun, the run has one process."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        store, rank, world_size = next(rendezvous("env://"))
        # after a restart the store may still hold messages of the previous attempt
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"attempt_{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        return cls(rank, local_rank, world_size, patient)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, number: int) -> range:
        """This process's share of so many prompts; the first shares may have one more."""
        each, left_over = divmod(number, self.world_size)
        first = self.rank * each + min(self.rank, left_over)
        return range(first, first + each + (self.rank < left_over))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, the same in all of them to the bit."""
        return self.gather(values[None]).sum(0)

    def max(self, values: Tensor) -> Tensor:
        return self.gather(values[None]).amax(0)

    def combine(self, metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means, or sums of those in COUNTED, of metrics that all processes name in one order."""
        own = [[values.sum(), values.size] for values in metrics.values()]
        totals = self.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        combined = {}
        for name, (total, count) in zip(metrics, totals, strict=True):
            if count:
                combined[name] = total if name.endswith(COUNTED) else total / count
        return combined

    def gather(self, share: Tensor) -> Tensor:
        """Concatenate tensors of equal shapes in the order of ranks."""
        if self.world_size == 1:
            return share
        shares = [torch.empty_like(share) for _ in range(self.world_size)]
        dist.all_gather(shares, share.contiguous())
        return torch.cat(shares)

    def on_all(self, function: Callable[[], T]) -> list[T]:
        """Run a function in all processes; return the results by rank. If one fails, all raise."""
        if self.world_size == 1:
            return [function()]
        own: list[Any] = [None, ""]  # the result, and what an error says
        everyone: list[Any] = [None] * self.world_size
        try:
            own[0] = function()
        except BaseException as error:
            own[1] = f"rank {self.rank}: {error_text(error)}"
            raise
        finally:
            dist.all_gather_object(everyone, own, group=self.patient)
        for _, error_said in everyone:
            if error_said:
                raise RunFailed(error_said)
        return [result for result, _ in everyone]

    def on_main(self, function: Callable[[], T]) -> T:
        """Run a function in the main process; return its result in all. If it fails, all raise."""
        results: list[Any] = self.on_all(lambda: function() if self.is_main else None)
        return results[0]

    def refuse_differences(self, values: Mapping[str, str]) -> None:
        """Raise ConfigError, in all of several processes, if two have another value of a name."""
        everyone = self.on_all(lambda: dict(values))
        for name in dict.fromkeys(chain(*everyone)):  # some may have files that others have not
            found = {values_of_one[name] for values_of_one in everyone if name in values_of_one}
            if len(found) > 1:
                raise ConfigError(f"processes differ in {name}, as by a shuffle or another version")

    def of_main(self, tensor: Tensor) -> Tensor:
        """The main process's values of a tensor that all have, in place."""
        dist.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

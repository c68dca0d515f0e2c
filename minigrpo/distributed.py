"""How many processes there are, and what they tell each other. With one process every method is the identity.

Nothing else touches torch.distributed (but accel.py may). The trainer asks no rank checks: it calls the same methods in every
process, in the same order, and there is one code path.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class DistContext:
    """One process among `world_size`."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_env(cls, *, backend: str = "gloo", timeout_s: float = 600) -> "DistContext":
        """Join the processes that torchrun started; alone, if it did not."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), dist.get_world_size())

    def share(self, num_prompts: int) -> range:
        """Which of a step's prompts are this process's: consecutive ones, as many for each."""
        each = num_prompts // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """The largest over processes, element by element."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> Tensor:
        """Equal shares of all processes in order of rank: `[P/W, ...]` -> `[P, ...]`."""
        if self.world_size == 1:
            return x
        shares = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(shares, x.contiguous())
        return torch.cat(shares)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as DDP, which averages gradients over processes in the backward pass."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[object]:
        """Backward passes in here add to the gradient and send nothing."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size == 1:
            return x
        x = x.clone()
        dist.all_reduce(x, operation)
        return x

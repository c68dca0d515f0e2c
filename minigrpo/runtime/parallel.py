"""How the processes of a run hold a model: one has it, each has it (DDP), or each has a shard.

The loss is a sum over the batch of all processes, so gradients are added up. A shard has an N-th of
the weights, the gradients and the moments (Zhao et al., arXiv 2304.11277); the whole weights of a
block are gathered while it runs.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..model.transformer import Transformer
from ..shards import set_parameter
from .distributed import DistContext


@dataclass
class Parallel:
    """Every process has all weights. Several are DDP, which starts from those of the main one."""

    device: torch.device
    dist: DistContext = field(default_factory=DistContext)
    is_sharded = False

    @staticmethod
    def of(device: torch.device, dist: DistContext, fsdp: bool) -> "Parallel":
        has_shards = fsdp and dist.world_size > 1
        return Sharded(device, dist) if has_shards else Parallel(device, dist)

    @property
    def gradient_divisor(self) -> int:
        """What torch divides the sum of the processes' gradients by."""
        return self.dist.world_size

    def prepare(self, model: Transformer) -> nn.Module:
        """Move a model to the device; return the module that computes gradients of its weights."""
        model.to(self.device)
        if self.dist.world_size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def adding_up(self, module: Any, is_last: bool) -> AbstractContextManager[object]:
        """A context for a micro-batch. DDP adds up the gradients of processes in the last one."""
        is_alone = self.dist.world_size == 1
        return nullcontext() if is_last or is_alone else module.no_sync()

    def num_micro_batches(self, own: int) -> int:
        """The micro-batches that each process runs in a step, if this one has `own`."""
        return own


class Sharded(Parallel):
    """Each process has a shard (FSDP2), at first of the main one's. All call methods together."""

    is_sharded = True
    gradient_divisor = 1

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.dist.world_size,))

    def prepare(self, model: Transformer) -> nn.Module:
        module = model.sharing_weights()
        for part, same_part in zip((*module.h, module), (*model.h, model), strict=True):
            for parameter in part.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = self.dist.of_main(parameter.data.to(self.device))
            # 1. This part keeps shards of its weights, and gathers the others when it runs.
            fully_shard(part, mesh=self.mesh)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # 2. The model has the same parameters, and gathers nothing.
            for name, shard in part.named_parameters():
                set_parameter(same_part, name, shard)
        return module

    def adding_up(self, module: Any, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()  # in each micro-batch, or whole gradients would pile up

    def num_micro_batches(self, own: int) -> int:
        """The most of any process, because each forward and backward pass gathers weights."""
        return int(self.dist.max(torch.tensor(own)))

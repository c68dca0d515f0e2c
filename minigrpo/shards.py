"""Weights in shards: each of N processes holds an N-th of a tensor's rows, as a `DTensor` of torch.

What makes whole tensors of them is a collective: all processes call it, in the same order.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, in each process. One that is not in shards is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(state: Any, is_main: bool) -> Any:
    """A state with whole tensors, on the host of the main process; elsewhere they are empty."""

    def gather(tensor: DTensor) -> Tensor:
        complete = whole(tensor.detach())
        return complete.cpu() if is_main else torch.empty(0)

    return tree_map_only(DTensor, gather, state)


def stored_like(tensor: Tensor, other: Tensor | None) -> Tensor:
    """A whole tensor as another one is stored, if that is in shards and of its shape."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter; one that is no parameter becomes a frozen one."""
    path, _, last = name.rpartition(".")
    is_parameter = isinstance(tensor, nn.Parameter)
    parameter = tensor if is_parameter else nn.Parameter(tensor, requires_grad=False)
    setattr(model.get_submodule(path), last, parameter)

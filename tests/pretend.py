"""A simulated CUDA device: it rejects what CUDA would reject, on a machine without a GPU.

All tensors stay in host memory, but each storage is marked as on the host or on the device, and
`x.device` answers accordingly. An operation whose inputs are in both places is an error, and its
outputs are where its inputs are. As in CUDA, zero-dimensional tensors may be anywhere. Index
tensors may not, although CUDA would copy them. A CUDA graph is a list of operations on the same
tensors that it was captured with.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:0")
SAME_DEVICE = {  # operations that want even tensors of no dimension on the device
    torch.ops.aten.stack.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._fused_adamw_.default,
}
SYNCHRONISING = {  # operations that make the host wait for the device
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
}
DEVICE_ATTRIBUTES = {
    "device": Tensor.device.__get__,  # type: ignore[attr-defined]
    "is_cuda": Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
}


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _DeviceMemory:
    """The storages that are on the device.

    A weak reference keeps the number of a freed storage from being given to another one.
    """

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}

    def __contains__(self, x: Tensor) -> bool:
        return _memory(x) in self.storages

    def add(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.storages[storage._cdata] = StorageWeakRef(storage)
        return x

    def remove(self, x: Tensor) -> Tensor:
        self.storages.pop(_memory(x), None)
        return x


class _Graph:
    """Stands in for torch.cuda.CUDAGraph: operations that can be run again."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, again in zip(tree_leaves(out), tree_leaves(new), strict=True):
                # equal memory: a view, or an operation in place, which needs no copy
                if isinstance(old, Tensor) and _memory(old) != _memory(again):
                    old.copy_(again)
        self.overwrite_intermediates()

    def overwrite_intermediates(self) -> None:
        """Fill with NaN all memory that the graph allocated itself.

        Graphs that share a pool overwrite it, so nothing may read it after a replay.
        """
        for _, args, kwargs, out in self.calls:
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.is_floating_point() and _memory(x) not in given:
                    x.fill_(torch.nan)


class _Operations(TorchDispatchMode):
    """Checks every operation, those of the backward pass included, and captures graphs."""

    def __init__(self, device_memory: _DeviceMemory) -> None:
        super().__init__()
        self.device_memory = device_memory
        self.graph: _Graph | None = None  # that is being captured
        self.waits = 0  # how often the host has waited for the device

    def check_may_wait(self, what: str) -> None:
        self.waits += 1
        if self.graph:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    @contextmanager
    def capture(self, graph: _Graph, **_: Any) -> Iterator[None]:
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
        graph.overwrite_intermediates()  # a capture computes nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x in self.device_memory for x in tensors)
        all_on_device = {id(x) for x in tree_leaves(args)} if func in SAME_DEVICE else set()
        misplaced = [
            x
            for x in tensors
            if x not in self.device_memory and (x.dim() or id(x) in all_on_device)
        ]
        if on_device and misplaced and (self.graph or func is not torch.ops.aten.copy_.default):
            places = [
                f"{tuple(x.shape)} on {'cuda' if x in self.device_memory else 'cpu'}"
                for x in tensors
            ]
            raise RuntimeError(f"{func}: tensors on two devices: {', '.join(places)}")
        boolean_index = func is torch.ops.aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if (func in SYNCHRONISING or boolean_index) and on_device:
            self.check_may_wait(str(func))
        out = func(*args, **(kwargs or {}))
        if self.graph:
            self.graph.calls.append((func, args, kwargs or {}, out))
        if on_device and func is not torch.ops.aten.copy_.default:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.device_memory.add(x)
        return out


class _Python(TorchFunctionMode):
    """Intercepts what Python code asks about devices, and copies between them."""

    def __init__(self, device_memory: _DeviceMemory, operations: _Operations) -> None:
        super().__init__()
        self.device_memory, self.operations = device_memory, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DEVICE_ATTRIBUTES.values():
            real = func(*args)
            if args[0] not in self.device_memory:
                return real
            return DEVICE if func == DEVICE_ATTRIBUTES["device"] else True
        if func is Tensor.numpy and args[0] in self.device_memory:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.cpu:
            func, args = Tensor.to, (args[0], "cpu")
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], DEVICE)
        asked = [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, torch.device | str)]
        asked = asked if func is Tensor.to or "device" in kwargs else []
        if not asked:
            return func(*args, **kwargs)
        where = torch.device(asked[0])
        args = tuple("cpu" if x is asked[0] else x for x in args)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if func is not Tensor.to:
            out = func(*args, **kwargs)
            return self.device_memory.add(out) if where.type == "cuda" else out
        same = (args[0] in self.device_memory) == (where.type == "cuda")
        if not same:
            self.operations.check_may_wait("a copy to another device")
            self.operations.waits -= where.type == "cuda"  # a small copy to the device only starts
        out = func(args[0] if same else args[0].clone(), *args[1:], **kwargs)
        if where.type == "cpu" and not same:
            return self.device_memory.remove(out)
        return self.device_memory.add(out) if where.type == "cuda" else out


def _on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which takes a device type, called with cpu instead."""

    @functools.wraps(function)
    def on_the_host(device_type: str = "cpu", *args: Any, **kwargs: Any) -> Any:
        return function("cpu", *args, **kwargs)

    return on_the_host


def _backward(loss: Tensor) -> None:
    """`Tensor.backward` with the modes on.

    torch's own turns them off, although checkpointed blocks are run again in it.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Operations]:
    """Within this context, `cuda:0` exists. Yields what counts the host's `waits` for it."""
    device_memory = _DeviceMemory()
    answers: dict[str, Any] = dict.fromkeys(
        ("set_device", "synchronize", "reset_peak_memory_stats")
    )
    answers |= {
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_name": "no device",
        "get_device_capability": (8, 0),
    }
    answers |= {"memory_allocated": 2**20, "max_memory_allocated": 2**21}
    monkeypatch.setattr(Tensor, "backward", _backward)
    # checkpointing compares devices of saved tensors with the modes off, of recomputed ones with
    # the modes on; they would differ
    monkeypatch.setitem(
        torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", lambda x: {}
    )
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
        monkeypatch.setattr(torch, name, _on_the_host(getattr(torch, name)))
    operations = _Operations(device_memory)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", operations.capture)
    for name in ("device", "stream", "graph_pool_handle", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: MagicMock())
    with operations, _Python(device_memory, operations):
        yield operations

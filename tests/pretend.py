"""A CUDA device that is none: tensors stay in host memory, but know where they would be, and refuse
what CUDA would refuse.

A tensor's place is that of its storage. Python sees `cuda:0`; below it, every operation whose
inputs are in both places is an error (numbers of no dimension may be anywhere, as in CUDA; indices
may not, though CUDA would copy them), and what it returns is where its inputs are. CUDA graphs are
lists of operations on the very tensors that they were recorded with.
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
JOINING = {  # operations that want numbers of no dimension on the device too
    torch.ops.aten.stack.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._fused_adamw_.default,
}
WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
}  # the host, for the device
PLACES = {  # what asks a tensor, or would move it
    "device": Tensor.device.__get__,  # type: ignore[attr-defined]
    "is_cuda": Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
}


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _There:
    """ModelSelection storages are on the device. A weak reference keeps a storage's number from being given
    to another one.
    """

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}

    def __contains__(self, x: Tensor) -> bool:
        return _memory(x) in self.storages

    def put(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.storages[storage._cdata] = StorageWeakRef(storage)
        return x

    def take(self, x: Tensor) -> Tensor:
        self.storages.pop(_memory(x), None)
        return x


class _Graph:
    """Operations, to be run again."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, again in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and _memory(old) != _memory(
                    again
                ):  # else it has looked at some, or written to it
                    old.copy_(again)
        self.forget()

    def forget(self) -> None:
        """What is not written to memory from outside is nobody's business: graphs that share a pool
        write over it.
        """
        for _, args, kwargs, out in self.calls:
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.is_floating_point() and _memory(x) not in given:
                    x.fill_(torch.nan)


class _Operations(TorchDispatchMode):
    """Those of the backward pass too."""

    def __init__(self, there: _There) -> None:
        super().__init__()
        self.there = there
        self.graph: _Graph | None = None  # is being recorded

    def may_wait(self, what: str) -> None:
        if self.graph:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    @contextmanager
    def record(self, graph: _Graph, **_: Any) -> Iterator[None]:
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
        graph.forget()  # recording computes nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x in self.there for x in tensors)
        joined = {id(x) for x in tree_leaves(args)} if func in JOINING else set()
        astray = [x for x in tensors if x not in self.there and (x.dim() or id(x) in joined)]
        if on_device and astray and (self.graph or func is not torch.ops.aten.copy_.default):
            places = [
                f"{tuple(x.shape)} on {'cuda' if x in self.there else 'cpu'}" for x in tensors
            ]
            raise RuntimeError(f"{func}: tensors on two devices: {', '.join(places)}")
        by_choice = func is torch.ops.aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if (func in WAITING or by_choice) and on_device:
            self.may_wait(str(func))
        out = func(*args, **(kwargs or {}))
        if self.graph:
            self.graph.calls.append((func, args, kwargs or {}, out))
        if on_device and func is not torch.ops.aten.copy_.default:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.there.put(x)
        return out


class _Python(TorchFunctionMode):
    """What Python code says of devices."""

    def __init__(self, there: _There, operations: _Operations) -> None:
        super().__init__()
        self.there, self.operations = there, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in PLACES.values():
            real = func(*args)
            if args[0] not in self.there:
                return real
            return DEVICE if func == PLACES["device"] else True
        if func is Tensor.numpy and args[0] in self.there:
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
            return self.there.put(out) if where.type == "cuda" else out
        same = (args[0] in self.there) == (where.type == "cuda")
        if not same:
            self.operations.may_wait("a copy to another device")
        out = func(args[0] if same else args[0].clone(), *args[1:], **kwargs)
        if where.type == "cpu" and not same:
            return self.there.take(out)
        return self.there.put(out) if where.type == "cuda" else out


def _of_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for a type of device that is not there."""

    @functools.wraps(function)
    def of_the_host(device_type: str = "cpu", *args: Any, **kwargs: Any) -> Any:
        return function("cpu", *args, **kwargs)

    return of_the_host


def _backward(loss: Tensor) -> None:
    """torch's own turns the modes off while it runs, and blocks are run again in there."""
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
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    there = _There()
    answers: dict[str, Any] = dict.fromkeys(
        ("set_device", "synchronize", "reset_peak_memory_stats")
    )
    answers |= {
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_name": "no device",
    }
    answers |= {"memory_allocated": 2**20, "max_memory_allocated": 2**21}
    monkeypatch.setattr(Tensor, "backward", _backward)
    # what is kept of a block is looked at with the modes off, what is made again with them on
    monkeypatch.setitem(
        torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", lambda x: {}
    )
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
        monkeypatch.setattr(torch, name, _of_the_host(getattr(torch, name)))
    operations = _Operations(there)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", operations.record)
    for name in ("device", "stream", "graph_pool_handle", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: MagicMock())
    with operations, _Python(there, operations):
        yield

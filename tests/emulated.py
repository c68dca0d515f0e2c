"""A CUDA device that computes on the CPU: torch's rules of devices, real numbers, and counts.

A tensor on it says, in Python and in C++, that it is on `cuda:0`, and autocast takes it as such;
its numbers are in a tensor on the CPU. Each operation is refused if its tensors are on different
devices, counted, and run on the CPU. emulated.cpp must be preloaded. Not emulated: CUDA's own
kernels (so attention is many operations, but a norm counts as one), streams, memory, graphs.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"_to_copy", "copy_"}
# the host needs a number, or the size of a result, and waits for the device
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# take a number from the host, as elementwise operations do
TAKE_A_NUMBER = {"fill_", "masked_fill", "masked_fill_", "index_put", "index_put_"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL = {*ALLOCATIONS, "_unsafe_view", "_fused_sdp_choice"}


class OnDevice(torch.Tensor):
    """A tensor on the device; `host` has its numbers."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnDevice":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, **layout, dtype=host.dtype, device="cuda:0"
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} where no EmulatedDevice is active")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)  # torch.load has map_location="cpu"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """The data of a parameter may move to the host."""
        torch.utils.swap_tensors(self, nn.Parameter(other, self.requires_grad))


class EmulatedDevice(TorchDispatchMode):
    """Refuses, counts and runs what is dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter()  # by operation, as if each were one kernel
        self.uploads = Counter()  # copies to the device, by place
        self.reads = Counter()  # waits of the host for the device, by operation and place

    def totals(self) -> Counter[str]:
        kinds = "launches", "uploads", "reads"
        return Counter({kind: getattr(self, kind).total() for kind in kinds})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = []

        def host_of(x: Tensor) -> Tensor:
            tensors.append(x)
            return x.host if isinstance(x, OnDevice) else x

        host_args = mapped(host_of, args)
        host_kwargs = {name: mapped(host_of, x) for name, x in (kwargs or {}).items()}
        here = [x for x in tensors if isinstance(x, OnDevice)]
        target = host_kwargs.get("device")
        if not here and (target is None or target.type != "cuda"):
            return func(*args, **kwargs or {})
        if target is not None:
            host_kwargs["device"] = torch.device("cpu")

        name = func.overloadpacket.__name__
        to_host = not isinstance(args[0], OnDevice) if name == "copy_" else str(target) == "cpu"
        if name not in COPIES:
            self._check(func, name, args, tensors)
        elif to_host and not host_kwargs.get("non_blocking"):
            self.reads[f"{name} at {place()}"] += 1
        elif len(here) < len(tensors):
            self.uploads[place()] += 1
        elif not to_host:
            self.launches[name] += 1

        if name == "_softmax" and host_args[2]:  # from float16 to float32, which a CPU has not
            host_args = host_args[0].float(), host_args[1], False
        if name.endswith("mm") and "dtype" in func._overloadname:  # 16 bits, with sums in float32
            func = func.overloadpacket
            host_args = [x.float() for x in host_args[:-1]]
        result = func(*host_args, **host_kwargs)
        if to_host:
            return result
        known = {id(x.host): x for x in here}  # an operation in place returns what it was given
        return mapped(lambda x: known[id(x)] if id(x) in known else OnDevice(x), result)

    def _check(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Refuse an operation with tensors of both sides, or count it."""
        indices = args[1] if name in INDEXING else ()
        takes_number = torch.Tag.pointwise in func.tags or name in TAKE_A_NUMBER
        for tensor in tensors:
            if isinstance(tensor, OnDevice):
                continue
            if any(tensor is index for index in indices):
                self.uploads[place()] += 1
            elif tensor.dim() or not takes_number:
                devices = [(tuple(x.shape), str(x.device)) for x in tensors]
                raise RuntimeError(f"different devices: {func} of {devices} at {place()}")
        by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        if name in READS or by_mask:
            self.reads[f"{name} at {place()}"] += 1
        elif not (func.is_view or name in NO_KERNEL):
            self.launches[name] += 1


def mapped(function: Callable[[Tensor], Any], x: Any) -> Any:
    """`function` of a tensor, or of each in a list."""
    if isinstance(x, Tensor):
        return function(x)
    return type(x)(mapped(function, each) for each in x) if isinstance(x, list | tuple) else x


def place() -> str:
    """The line of minigrpo that runs."""
    frame = sys._getframe()
    while frame.f_back and "/minigrpo/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/minigrpo/')[2]}:{frame.f_lineno}"


@contextmanager
def emulated() -> Iterator[EmulatedDevice]:
    """Within it, torch has the device, in this thread."""
    device = EmulatedDevice()
    zero = ["_lazy_init", "set_device", "current_device"]
    zero += [f"{peak}memory_{kind}" for peak in ("", "max_") for kind in ("allocated", "reserved")]
    one = ["is_available", "device_count", "is_bf16_supported"]
    answers = {name: lambda *_, **__: 0 for name in zero} | {name: lambda **_: 1 for name in one}
    answers["mem_get_info"] = lambda *_: (2**34, 2**34)
    answers["get_device_capability"] = lambda *_: (7, 0)
    answers["get_device_name"] = lambda: "emulated"
    answers["synchronize"] = lambda *_: device.reads.update([f"synchronize at {place()}"])
    rms_norm = torch.rms_norm

    def fused_norm(*args: Any) -> Tensor:
        before = Counter(device.launches)
        result = rms_norm(*args)
        device.launches = before + Counter(["rms_norm"])
        return result

    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device=..) dispatches its copy
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.multiple(torch.cuda, **answers),
            patch.object(torch, "rms_norm", fused_norm),
            patch.object(torch.Tensor, "pin_memory", lambda self: self),
            torch.autograd.set_multithreading_enabled(False),
            device,
        ):
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)

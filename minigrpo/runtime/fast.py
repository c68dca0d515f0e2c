"""What --fast turns on: the speed layers that help on the current device."""

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..config import SpeedConfig

Capability = tuple[int, int]  # CUDA's compute capability
BFLOAT16_AND_TF32: Capability = (8, 0)  # Ampere; below, bfloat16 is emulated and there is no TF32
FLOAT16: Capability = (7, 0)  # Volta, the first tensor cores; below, float16 is slow

ALWAYS = {
    "packing": "prefix-tree",
    "kv_cache": True,
    "speculate": "auto",
    "fused_optimizer": True,
    "skip_zero_variance_groups": True,
}
LOW = {"use_amp": True, "low_precision_weights": True}
# on CPU by measurement; on CUDA by reasoning only, not measured yet
LAYERS: dict[str, dict[str, Any]] = {
    "cpu": ALWAYS,
    "cpu with bfloat16": {**ALWAYS, **LOW, "amp_dtype": "bfloat16"},
    "cuda": {**ALWAYS, **LOW, "amp_dtype": "bfloat16", "use_tf32": True, "compile_model": True},
    "cuda without bfloat16": {**ALWAYS, **LOW, "amp_dtype": "float16", "compile_model": True},
    "cuda without tensor cores": ALWAYS,  # nor does torch.compile support these cards
}
# the row to use if --amp-dtype asks for a precision that the device has, but the row does not name
ALSO_FAST = {("cuda", "float16")}


def device_kind(device: str) -> str:
    """The row of LAYERS for --device."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        capability = cuda_capability(device)
        if capability >= BFLOAT16_AND_TF32:
            return "cuda"
        return "cuda without bfloat16" if capability >= FLOAT16 else "cuda without tensor cores"
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "cpu with bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") else "cpu"


def cuda_capability(device: str) -> Capability:
    """The compute capability of --device: the lowest, if local processes use several cards.

    Where there is no CUDA device, a recent one is assumed: such a run ends when it asks for it.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if ":" in device:
        index = device.partition(":")[2]
        cards = [int(index)] if index.isdecimal() and int(index) < count else []
    else:  # torchrun gives each local process a card of its own
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        cards = list(range(min(count, int(processes) if processes.isdecimal() else 1)))
    return min(map(torch.cuda.get_device_capability, cards), default=BFLOAT16_AND_TF32)


def fast_layers(speed: "SpeedConfig", given: Collection[str]) -> dict[str, Any]:
    """The settings that --fast adds to those that are `given`; none without --fast."""
    if not speed.fast:
        return {}
    kind = device_kind(speed.device)
    row = LAYERS[kind]
    layers = {name: value for name, value in row.items() if name not in given}
    if "amp_dtype" in given and "use_amp" in layers:
        has = speed.amp_dtype == row["amp_dtype"] or (kind, speed.amp_dtype) in ALSO_FAST
        layers["use_amp"] = has and layers["use_amp"]
    if not layers.get("use_amp", speed.use_amp):
        layers.pop("low_precision_weights", None)
        layers.pop("amp_dtype", None)
    return layers

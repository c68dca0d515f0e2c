"""What --fast turns on: the speed layers that help on the current device."""

from collections.abc import Collection
from typing import Any

import torch

ALWAYS = {
    "packing": "prefix-tree",
    "kv_cache": True,
    "speculative_decoding": True,
    "fused_optimizer": True,
    "skip_zero_variance_groups": True,
}
LOW = {"use_amp": True, "low_precision_weights": True}
# on CPU by measurement; on CUDA by reasoning only, not measured yet
LAYERS: dict[str, dict[str, Any]] = {
    "cpu": ALWAYS,
    "cpu with bfloat16": {**ALWAYS, **LOW},
    "cuda": {**ALWAYS, **LOW, "use_tf32": True, "compile_model": True},
}


def device_kind(device: str, amp_dtype: str) -> str:
    """The row of LAYERS for --device. A CPU without bfloat16 instructions stays in float32."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return "cuda"
    found: dict[str, Any] = {}
    if amp_dtype == "bfloat16":
        found = getattr(torch.cpu, "get_capabilities", dict)()
    return "cpu with bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") else "cpu"


def fast_layers(
    device: str, amp_dtype: str, use_amp: bool, given: Collection[str]
) -> dict[str, Any]:
    """The settings that --fast adds to those that are `given`."""
    row = LAYERS[device_kind(device, amp_dtype)]
    layers = {name: value for name, value in row.items() if name not in given}
    if not layers.get("use_amp", use_amp):
        layers.pop("low_precision_weights", None)
    return layers

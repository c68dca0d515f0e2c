"""The rows of the steps benchmark: grpo.py, the library without its speed layers, and one layer
more per row.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from minigrpo.config import SpeedConfig
from minigrpo.runtime import accel
from minigrpo.runtime.flags import ConfigError

GRPO_PY = "grpo.py"
EVERYWHERE = ("cpu", "cuda")
# every speed layer off, regardless of defaults and config
PLAIN: dict[str, Any] = {
    "packing": "repeated",
    "kv_cache": True,
    "share_prompt_kv": False,
    "cuda_graphs": False,
    "low_precision_weights": False,
    "speculative_decoding": False,
    "fused_optimizer": False,
    "parallel_rewards": False,
    "overlap_rewards": False,
    "skip_zero_variance_groups": False,
    "use_amp": False,
    "use_tf32": False,
    "compile_model": False,
    "gradient_checkpointing": False,
    "chunked_logprobs": False,
    "offload_reference": False,
    "rollout_batch_size": 0,
}
LEAN: dict[str, Any] = {
    "gradient_checkpointing": True,
    "chunked_logprobs": True,
    "offload_reference": True,
    "share_prompt_kv": True,
}


@dataclass(frozen=True)
class Layer:
    """What one row adds to the rows above it."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    needs: str = ""  # the only kind of device that supports it
    not_kept_on: tuple[str, ...] = ()  # kinds of devices on which the rows below leave it off


LAYERS = (
    Layer(GRPO_PY),
    Layer("the library, no speed layers"),
    Layer("rewards in a pool", {"parallel_rewards": True}),
    Layer("fused AdamW", {"fused_optimizer": True}),
    Layer("zero-variance groups skipped", {"skip_zero_variance_groups": True}),
    Layer("shared-prompt packing", {"packing": "shared-prompt"}),
    Layer("shared prompt KV", {"share_prompt_kv": True}, not_kept_on=EVERYWHERE),
    Layer("speculative decoding", {"speculative_decoding": True}),
    Layer("prefix-tree packing", {"packing": "prefix-tree"}),
    Layer("TF32", {"use_tf32": True}, needs="cuda"),
    # not kept on CPU, so that the rows below sample the same completions as grpo.py
    Layer("bfloat16 autocast", {"use_amp": True}, not_kept_on=("cpu",)),
    Layer(
        "bfloat16 autocast and weights",
        {"use_amp": True, "low_precision_weights": True},
        not_kept_on=("cpu",),
    ),
    Layer("torch.compile", {"compile_model": True}, not_kept_on=("cpu",)),
    Layer("CUDA graphs", {"cuda_graphs": True}, needs="cuda", not_kept_on=EVERYWHERE),
    Layer(
        "overlapped rewards",
        {"overlap_rewards": True, "rollout_batch_size": 4},
        not_kept_on=EVERYWHERE,
    ),
    Layer("chunked log-probs", {"chunked_logprobs": True}, not_kept_on=EVERYWHERE),
    Layer("gradient checkpointing", {"gradient_checkpointing": True}, not_kept_on=EVERYWHERE),
    Layer("offloaded reference", {"offload_reference": True}, not_kept_on=EVERYWHERE),
    Layer(
        "lean: all memory layers, one prompt at a time",
        {**LEAN, "micro_batch_size": 1},
        not_kept_on=EVERYWHERE,
    ),
)


@dataclass(frozen=True)
class RowSpec:
    """What a row runs: grpo.py, or the library with these flags."""

    name: str  # in brackets if the rows below do not keep its layer
    flags: dict[str, Any]
    status: str = "ok"  # or why it cannot run here

    @property
    def is_grpo_py(self) -> bool:
        return self.name == GRPO_PY


def stacked(device: torch.device) -> list[RowSpec]:
    """Every layer on top of the layers above it that this device keeps."""
    rows, flags = list[RowSpec](), PLAIN
    for layer in LAYERS:
        kept = device.type not in layer.not_kept_on
        name, status = layer.name if kept else f"({layer.name})", _status(layer, device)
        row = RowSpec(name, {**flags, **layer.flags}, status)
        rows.append(row)
        if kept and status == "ok":
            flags = row.flags
    return rows


def alone(device: torch.device) -> list[RowSpec]:
    """Every layer by itself, on top of the library without speed layers."""
    return [
        RowSpec(layer.name, {**PLAIN, **layer.flags}, _status(layer, device)) for layer in LAYERS
    ]


def _status(layer: Layer, device: torch.device) -> str:
    if layer.needs not in ("", device.type):
        return f"needs {layer.needs}"
    if layer.flags.get("compile_model"):
        try:
            accel.check_compiler(SpeedConfig(compile_model=True), device)
        except ConfigError as error:
            return str(error)
    return "ok"

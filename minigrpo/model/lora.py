"""LoRA (Hu et al., arXiv 2106.09685): train two small matrices beside each frozen linear layer.

    y = W x + alpha / rank * B A x        A [rank, in], B [out, rank]; B starts at 0

Only A and B have gradients, optimizer state and a place in checkpoints. With A and B of the start,
the model is the one that training started from: the reference of a KL shares all other weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, refusing
from . import hf
from .linear import Linear, dense, linear
from .transformer import Transformer

# PEFT computes the formula above with any value of these settings in adapter_config.json, since the
# names of tensors say which layers have adapters. Of other settings only these are taken.
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora"),
}
INITS = (True, "gaussian", "orthogonal", "eva")  # others change the base too
SUPPORTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITS}


class LoRALinear(Linear):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        """`base` gives its parameters to this layer. A is uniform in +-1 / sqrt(in), as in PEFT."""
        super().__init__(base.in_features, base.out_features, device="meta")  # takes no memory
        self.weight = base.weight
        self.bias = base.bias
        self.scale = alpha / rank
        bound = 1 / math.sqrt(base.in_features)
        drawn = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        if self.scale == 0:
            return out
        return out + linear(linear(inputs, self.lora_A), self.lora_B) * self.scale


def add_adapters(
    model: Transformer, rank: int, alpha: float = 0, targets: str = "", seed: int = 0
) -> None:
    """Freeze a model and add adapters by --lora-rank etc., in place; with rank 0, do nothing."""
    if not rank:
        return
    chosen = {*targets.replace(" ", "").split(",")} - {""}
    parts = model.h.named_modules(prefix="h")
    linears = {name: part for name, part in parts if type(part) is Linear}
    names = layer_names(model, linears)
    unknown = chosen - {*names, *linears}
    if unknown:
        raise ConfigError(f"--lora-targets: {', '.join(unknown)} is none of {', '.join(names)}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, base in linears.items():
        # c_proj is the name of two layers of a GPT-2 block; both are meant
        if not chosen or chosen & {name, *layer_names(model, [name])}:
            model.set_submodule(name, LoRALinear(base, rank, alpha or 2.0 * rank, generator))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoRALinear)}


def layer_names(model: Transformer, layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names in files, such as q_proj, each once."""
    return sorted({hf.stored_name(model.shape, name).split(".")[-1] for name in layers})


def freeze_adapters(model: nn.Module) -> None:
    """Give a model that shares its parameters adapters of its own; new ones have no effect."""
    for layer in adapters(model).values():
        if not layer.lora_B.any():
            layer.scale = 0.0
        layer.lora_A = nn.Parameter(layer.lora_A.detach().clone(), requires_grad=False)
        layer.lora_B = nn.Parameter(layer.lora_B.detach().clone(), requires_grad=False)


@torch.no_grad()
def merge_adapters(model: Transformer) -> Transformer:
    """Make a model with adapters a plain one that computes the same, in place, in float32."""
    for parameter in model.parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        parameter.data = dense(parameter.data, wide)
    for name, layer in adapters(model).items():
        plain = Linear(layer.in_features, layer.out_features, device="meta")
        # in float64, so that all machines round alike
        change = layer.lora_B.double() @ layer.lora_A.double() * layer.scale
        merged = (layer.weight.double() + change).to(layer.lora_A.dtype)
        plain.weight = nn.Parameter(merged)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    return model.requires_grad_(True)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of the state dict that training changes: the adapters, or without them all of it."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def load_trained(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a `trained_state`. Raises RuntimeError, which names the tensors that do not fit."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    model.load_state_dict({**frozen, **state})


def peft_names(model: Transformer) -> dict[str, str]:
    """The names of the adapters' tensors here -> in adapter_model.safetensors."""
    prefix = f"base_model.model.{model.shape.kind.prefix}"
    names = trained_state(model)
    return {name: f"{prefix}{hf.stored_name(model.shape, name)}.weight" for name in names}


def peft_settings(model: Transformer) -> dict[str, Any]:
    """The settings of PEFT that say which adapters a model has."""
    layers = adapters(model)
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    names = layer_names(model, layers)
    return {"r": rank, "lora_alpha": first.scale * rank, "target_modules": names}


def peft_files(model: Transformer, *, base: str) -> dict[str, Callable[[Path], object]]:
    """The files that PEFT loads, by name: what writes each to a path. `base`: see `hf.base_of`."""
    names = peft_names(model)
    tensors = {names[name]: x for name, x in trained_state(model).items()}
    on_hub = hf.HUB_NAME.fullmatch(base)
    name, revision = on_hub.groups() if on_hub else (base, None)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "fan_in_fan_out": model.shape.kind.is_gpt2,
        **peft_settings(model),
    }
    return {
        hf.ADAPTER_FILE: partial(hf.write_tensors, tensors),
        hf.ADAPTER_CONFIG: lambda path: path.write_text(json.dumps(settings, indent=1)),
    }


def load_peft(model: Transformer, folder: Path) -> None:
    """Load adapters of PEFT's into a model with the same ones. Raises ConfigError."""
    tensors = hf.read_tensors(folder / hf.ADAPTER_FILE)
    ours = {stored: name for name, stored in peft_names(model).items()}
    with refusing(f"{folder}: adapters for another model, or of a kind that is not supported"):
        load_trained(model, {ours.get(stored, stored): x for stored, x in tensors.items()})


def attach_peft(model: Transformer, folder: Path) -> None:
    """Freeze a model, and put the adapters in a folder beside its layers. Raises ConfigError."""
    settings = hf.read_adapter_settings(folder)
    for name, value in hf.read_json(folder / hf.ADAPTER_CONFIG).items():
        if value and name not in HARMLESS and value not in SUPPORTED.get(name, ()):
            raise ConfigError(f"{folder}: adapters with {name} {value!r} are not supported")
    in_all_layers = Transformer(model.shape, seed=None)
    add_adapters(in_all_layers, rank=1)
    names = peft_names(in_all_layers)
    stored = hf.read_tensors(folder / hf.ADAPTER_FILE)
    layers = {name.rpartition(".")[0] for name in names if names[name] in stored}
    stretch = settings.r**0.5 if settings.use_rslora else 1  # scaled by alpha / sqrt(rank)
    with refusing(folder / hf.ADAPTER_CONFIG):
        add_adapters(model, settings.r, settings.lora_alpha * stretch, ",".join(layers))
    load_peft(model, folder)

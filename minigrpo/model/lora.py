"""LoRA (Hu et al., arXiv 2106.09685): train two small matrices beside each frozen linear layer.

    y = W x + alpha / rank * B A x        A [rank, in], B [out, rank]; B starts at 0

Only A and B have gradients, optimizer state and a place in checkpoints. With the adapters off, the
model is the one that training started from, so the reference of a KL needs no second copy.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..types import ConfigError
from .hf import GPT2_PREFIX, HUB_NAME, read_tensors, stored_name, write_tensors
from .linear import Linear, dense, linear
from .transformer import Transformer

ADAPTER_FILE = "adapter_model.safetensors"


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
    linears = {name: part for name, part in model.h.named_modules() if type(part) is Linear}
    names = layer_names(linears)
    unknown = chosen - {*names}
    if unknown:
        raise ConfigError(f"--lora-targets: {', '.join(unknown)} is none of {', '.join(names)}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, base in linears.items():
        # c_proj is the name of two layers of a GPT-2 block; both are meant
        if not chosen or name.split(".")[-1] in chosen:
            model.h.set_submodule(name, LoRALinear(base, rank, alpha or 2.0 * rank, generator))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoRALinear)}


def layer_names(layers: Mapping[str, nn.Module]) -> list[str]:
    """The last parts of names, such as q_proj, each once."""
    return sorted({name.split(".")[-1] for name in layers})


def disable_adapters(model: nn.Module) -> None:
    """Make a model compute what it computed before it got adapters."""
    for layer in adapters(model).values():
        layer.scale = 0.0


@torch.no_grad()
def merge_adapters(model: Transformer) -> Transformer:
    """Make a model with adapters a plain one that computes the same, in place, in float32.

    Sums are in float64, so that all machines round them alike.
    """
    for parameter in model.parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        parameter.data = dense(parameter.data, wide)
    for name, layer in adapters(model).items():
        plain = Linear(layer.in_features, layer.out_features, device="meta")
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
    prefix = f"base_model.model.{GPT2_PREFIX if model.shape.is_gpt2 else ''}"
    names = trained_state(model)
    return {name: f"{prefix}{stored_name(model.shape, name)}.weight" for name in names}


def peft_files(model: Transformer, *, base: str) -> dict[str, Callable[[Path], object]]:
    """The adapters as `PeftModel.from_pretrained(base_model, folder)` loads them.

    Of each file the name, and what writes it to a path. `base`: the name or path of the model that
    the adapters belong to; on the Hub, perhaps with @REVISION.
    """
    layers = adapters(model)
    first = next(iter(layers.values()))
    names = peft_names(model)
    tensors = {names[name]: x for name, x in trained_state(model).items()}
    on_hub = HUB_NAME.fullmatch(base)
    name, revision = on_hub.groups() if on_hub else (base, None)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": len(first.lora_A),
        "lora_alpha": first.scale * len(first.lora_A),
        "target_modules": layer_names(layers),
        "fan_in_fan_out": model.shape.is_gpt2,
    }
    return {
        ADAPTER_FILE: partial(write_tensors, tensors),
        "adapter_config.json": lambda path: path.write_text(json.dumps(settings, indent=1)),
    }


def load_peft(model: Transformer, file: Path) -> None:
    """Load what `peft_files` wrote into a model with the same adapters."""
    tensors = read_tensors(file)[1]
    load_trained(model, {name: tensors[stored] for name, stored in peft_names(model).items()})

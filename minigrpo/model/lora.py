"""LoRA (Hu et al., arXiv 2106.09685): train two small matrices beside each frozen linear layer.

    y = W x + alpha / rank * B A x        A [rank, in], B [out, rank]; B starts at 0

Only A and B have gradients, optimizer state and a place in checkpoints. With the adapters off, the
model is the one that training started from, so the reference of a KL needs no second copy.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .families import FAMILIES
from .linear import Linear, linear
from .shape import ModelShape
from .transformer import Transformer

ADAPTERS = ("lora_A", "lora_B")
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoRALinear(Linear):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        """`base` gives its parameters to this layer. The adapter's values are not set."""
        with torch.device("meta"):  # no memory for weights that the next lines replace
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.enabled = alpha / rank, True
        weight = base.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(weight.new_empty(rank, base.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.enabled:
            return out
        return out + linear(linear(x, self.lora_A), self.lora_B) * self.scale


def add_adapters(
    model: Transformer, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
) -> None:
    """Freeze a model, and add an adapter to linear layers of its blocks, in place.

    Args:
        targets: names of layers, such as q_proj; empty: every linear layer of the blocks.
        seed: of A, which is uniform in +-1 / sqrt(in), as PEFT starts it.

    Raises:
        ValueError: a target that the model does not have; the message lists those that it has.
    """
    found = {name: part for name, part in model.h.named_modules() if type(part) is Linear}
    names = list(dict.fromkeys(name.split(".")[-1] for name in found))
    if unknown := [target for target in targets if target not in names]:
        # c_proj is the name of two layers of a GPT-2 block; both are meant
        raise ValueError(f"the model has no layer {', '.join(unknown)}; it has {', '.join(names)}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, base in found.items():
        parent, _, last = name.rpartition(".")
        if targets and last not in targets:
            continue
        layer = LoRALinear(base, rank, alpha)
        bound = 1 / math.sqrt(base.in_features)
        with torch.no_grad():
            drawn = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
            layer.lora_A.copy_(drawn)
        setattr(model.h.get_submodule(parent), last, layer)


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoRALinear)}


def disable_adapters(model: nn.Module) -> None:
    """Make a model compute what it computed before it got adapters."""
    for layer in adapters(model).values():
        layer.enabled = False


@torch.no_grad()
def merged_state(model: Transformer) -> dict[str, Tensor]:
    """The state dict of a model without adapters that computes the same function."""
    state = {name: x for name, x in model.state_dict().items() if not name.endswith(ADAPTERS)}
    for name, layer in adapters(model).items():
        change = layer.scale * (layer.lora_B @ layer.lora_A)
        state[f"{name}.weight"] = layer.weight.to(change.dtype) + change
    return state


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen matrices in `dtype`; norms and biases are small and keep theirs."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)


def save_peft(model: Transformer, folder: Path, *, base: str) -> None:
    """Write the adapters as PEFT does: `PeftModel.from_pretrained(base_model, folder)` loads them.

    Args:
        base: the name or path of the model that the adapters belong to.
    """
    layers = adapters(model)
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_peft_tensors(layers, model.shape), folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    settings: Mapping[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-1] for name in layers}),
        "fan_in_fan_out": model.shape.family == "gpt2",  # weights are stored as [in, out]
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=1) + "\n")


def _peft_tensors(layers: Mapping[str, LoRALinear], shape: ModelShape) -> dict[str, Tensor]:
    family = FAMILIES[shape.family]
    tensors = {}
    for name, layer in layers.items():
        stored = family.theirs(f"{name}.").removesuffix(".")
        for part in ADAPTERS:
            key = f"base_model.model.{family.prefix}{stored}.{part}.weight"
            tensors[key] = getattr(layer, part).detach().float().cpu().contiguous()
    return tensors

"""LoRA (Hu et al., arXiv 2106.09685): train two small matrices beside each frozen linear layer.

    y = W x + alpha / rank * B A x        A [rank, in], B [out, rank]; B starts at 0

Only A and B have gradients, optimizer state and a place in checkpoints. With the adapters off, the
model is the one that training started from, so the reference of a KL needs no second copy.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..runtime.text import quoted
from .families import FAMILIES
from .hub import HubModel
from .linear import Linear, linear
from .logprobs import at_least_fp32
from .shape import ModelShape
from .transformer import Transformer
from .weight_files import write_tensors

ADAPTERS = ("lora_A", "lora_B")
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a float -> integers as wide
SUMMED = 1 << 24  # values added up at once, because torch widens them first


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
    names = layer_names(found)
    if unknown := [target for target in targets if target not in names]:
        # c_proj is the name of two layers of a GPT-2 block; both are meant
        raise ValueError(
            f"the model has no layer {', '.join(map(quoted, unknown))}; it has {', '.join(names)}"
        )
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


def layer_names(layers: Iterable[str]) -> list[str]:
    """The last parts of names, such as q_proj, each once."""
    return list(dict.fromkeys(name.split(".")[-1] for name in layers))


def disable_adapters(model: nn.Module) -> None:
    """Make a model compute what it computed before it got adapters."""
    for layer in adapters(model).values():
        layer.enabled = False


@torch.no_grad()
def merge_adapters(model: Transformer) -> Transformer:
    """Make a model with adapters a plain one that computes the same, in place, in float32.

    Sums are in float64, so that all machines round them alike: a run that starts from merged
    weights then finds the same ones wherever it is resumed.
    """
    for name, layer in adapters(model).items():
        with torch.device("meta"):
            plain = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        change = layer.lora_B.double() @ layer.lora_A.double() * layer.scale
        merged = (layer.weight.double() + change).to(layer.lora_A.dtype)
        plain.weight, plain.bias = nn.Parameter(merged), layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    for parameter in model.parameters():
        parameter.data = at_least_fp32(parameter.data)
    return model.requires_grad_(True)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen matrices in `dtype`; norms and biases are small and keep theirs."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)


# --- checkpoints ----------------------------------------------------------------------------------


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, by name; none without adapters."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of the state dict that training changes: the adapters, or without them all of it."""
    frozen = frozen_weights(model)
    return {name: x for name, x in model.state_dict().items() if name not in frozen}


def load_trained(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a `trained_state`.

    Raises RuntimeError, which names them, if tensors do not fit or are not finite.
    """
    expected = trained_state(model).keys()
    problems = [f"{name} is missing" for name in expected - state.keys()]
    problems += [f"{name} is unknown" for name in state.keys() - expected]
    # copied into a weight, complex numbers and integers would become others without a word
    problems += [
        f"{name} is no tensor of real numbers"
        for name, x in state.items()
        if not (isinstance(x, Tensor) and x.is_floating_point())
    ]
    if not problems:
        problems = [f"{name} is not finite" for name, x in state.items() if not x.isfinite().all()]
    if problems:
        raise RuntimeError("; ".join(sorted(problems)[:8]))
    model.load_state_dict(state, strict=False)


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A hash that another name, shape or value of a weight changes, whatever the device.

    Of each weight the bits are added up, as integers, each times its place: no order of additions
    changes that, and an exchange of two values does.
    """
    digest = hashlib.sha256()
    for name, x in weights.items():
        bits = x.detach().flatten().view(BITS[x.element_size()])
        total = 0
        for number, part in enumerate(bits.split(SUMMED)):
            places = torch.arange(1, len(part) + 1, device=part.device) + number * SUMMED
            total += int((part.long() * places).sum())
        digest.update(f"{name} {list(x.shape)} {x.dtype} {total}\n".encode())
    return digest.hexdigest()


# --- PEFT -----------------------------------------------------------------------------------------


def peft_files(
    model: Transformer, *, base: str, **metadata: str
) -> dict[str, Callable[[Path], object]]:
    """The adapters as PEFT stores them: each file's name, and what writes the file to a path.

    `PeftModel.from_pretrained(base_model, folder)` loads them.

    Args:
        base: the name or path of the model that the adapters belong to; for a model on the Hub,
            perhaps with @REVISION.
        metadata: of the file of weights, which PEFT does not read.
    """
    layers = adapters(model)
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    tensors = _peft_tensors(layers, model.shape)
    name, _, revision = base.partition("@") if HubModel.of(base) else (base, "", "")
    settings: Mapping[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layer_names(layers),
        "fan_in_fan_out": model.shape.family == "gpt2",  # weights are stored as [in, out]
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=1) + "\n"
    return {
        PEFT_WEIGHTS: lambda path: write_tensors(path, tensors, metadata),
        PEFT_CONFIG: lambda path: path.write_text(text),
    }


def _peft_tensors(layers: Mapping[str, LoRALinear], shape: ModelShape) -> dict[str, Tensor]:
    family = FAMILIES[shape.family]
    tensors = {}
    for name, layer in layers.items():
        stored = family.theirs(f"{name}.").removesuffix(".")
        for part in ADAPTERS:
            key = f"base_model.model.{family.prefix}{stored}.{part}.weight"
            tensors[key] = getattr(layer, part).detach().float().cpu().contiguous()
    return tensors

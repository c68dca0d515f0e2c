"""LoRA (Hu et al., arXiv 2106.09685): train two small matrices beside each frozen linear layer.

    y = W x + alpha / rank * B A x        A [rank, in], B [out, rank]; B starts at 0

Only A and B have gradients, optimizer state and a place in checkpoints. The reference of a KL has
the initial A and B, and shares all other weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError, refusing
from ..hub import HUB_NAME, read_json
from ..shards import stored_like
from . import hf
from .linear import Linear, dense, linear
from .shape import ModelShape
from .transformer import Transformer

# Settings of adapter_config.json that change nothing here: names of tensors say which layers have
# adapters, `AdapterSettings.alpha` covers use_rslora, and training has no dropout.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
    "target_modules", "exclude_modules", "layers_pattern", "layers_to_transform",
    "r", "lora_alpha", "lora_dropout", "use_rslora",
}  # fmt: skip
INITS = (True, "gaussian", "orthogonal", "eva")  # other ones change the base too
# other setting -> its values that are accepted
SUPPORTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITS}


class LoRALinear(Linear):
    def __init__(
        self,
        base: Linear,
        rank: int,
        alpha: float,
        generator: torch.Generator,
    ) -> None:
        """Take over the parameters of `base`. A is uniform in +-1 / sqrt(in), as in PEFT."""
        super().__init__(base.in_features, base.out_features, device="meta")  # takes no memory
        self.weight = base.weight
        self.bias = base.bias
        self.scale = alpha / rank
        bound = 1 / math.sqrt(base.in_features)
        drawn = torch.empty(rank, base.in_features)
        drawn.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        if self.scale == 0:
            return out
        low_rank = linear(inputs, self.lora_A)
        return torch.addmm(out, low_rank, self.lora_B.t(), alpha=self.scale)


def add_adapters(
    model: Transformer,
    rank: int,
    alpha: float = 0,
    targets: str = "",
    seed: int = 0,
) -> None:
    """Freeze a model and add adapters by --lora-rank etc., in place; with rank 0, do nothing."""
    if not rank:
        return
    chosen = {*targets.replace(" ", "").split(",")} - {""}
    modules = model.h.named_modules(prefix="h")
    linears = {name: module for name, module in modules if type(module) is Linear}
    names = layer_names(model, linears)
    unknown = chosen - {*names, *linears}
    if unknown:
        known = ", ".join(names)
        raise ConfigError(f"--lora-targets must be among {known}, got {', '.join(unknown)}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, base in linears.items():
        # two layers of a GPT-2 block have the name c_proj, which means both
        if not chosen or chosen & {name, *layer_names(model, [name])}:
            model.set_submodule(name, LoRALinear(base, rank, alpha or 2.0 * rank, generator))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    modules = dict(model.named_modules())
    return {name: layer for name, layer in modules.items() if isinstance(layer, LoRALinear)}


def layer_names(model: Transformer, layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names in files, such as q_proj, each once."""
    stored = [hf.stored_name(model.shape, name) for name in layers]
    return sorted({name.split(".")[-1] for name in stored})


def freeze_adapters(model: nn.Module) -> None:
    """Give a model that shares parameters frozen copies of its adapters; those of 0 are skipped."""
    for layer in adapters(model).values():
        if not layer.lora_B.any():
            layer.scale = 0.0
        a = layer.lora_A.detach().clone()
        b = layer.lora_B.detach().clone()
        layer.lora_A = nn.Parameter(a, requires_grad=False)
        layer.lora_B = nn.Parameter(b, requires_grad=False)


@torch.no_grad()
def merge_adapters(model: Transformer, matrix_dtype: str = "float32") -> Transformer:
    """Make a model with adapters a plain one that computes the same, in place, in float32.

    Raises ConfigError if they would be lost when it is stored in `matrix_dtype` after that.
    """
    if matrix_dtype == "nf4" and adapters(model):
        raise ConfigError("--base-dtype nf4 would round the model's adapters away: docs/recipes.md")
    for parameter in model.parameters():
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parameter.data = dense(parameter.data, dtype)
    for name, layer in adapters(model).items():
        plain = Linear(layer.in_features, layer.out_features, device="meta")
        # in float64, so that all machines round in the same way
        change = layer.lora_B.double() @ layer.lora_A.double() * layer.scale
        merged = layer.weight.double() + change
        plain.weight = nn.Parameter(merged.to(layer.lora_A.dtype))
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    return model.requires_grad_(True)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: the adapters, or all weights without any."""
    named = dict(model.named_parameters())
    has_adapters = bool(adapters(model))
    return {name: p.detach() for name, p in named.items() if p.requires_grad or not has_adapters}


def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a `trained_state`. Raises RuntimeError with the names of tensors that do not fit."""
    own = dict(model.named_parameters())
    frozen = {name: p for name, p in own.items() if not p.requires_grad}
    loaded = {name: stored_like(x, own.get(name)) for name, x in state.items()}
    model.load_state_dict(frozen | loaded)


def peft_name(shape: ModelShape, name: str) -> str:
    stored = hf.stored_name(shape, name)
    return f"base_model.model.{shape.family_row.prefix}{stored}.weight"


def peft_files(model: Transformer, *, base: str) -> dict[str, Callable[[Path], object]]:
    """Name of each file of PEFT -> its writer. `base` is "" if PEFT cannot load the base."""
    tensors = {peft_name(model.shape, name): x for name, x in trained_state(model).items()}
    name = base
    revision = None
    if on_hub := HUB_NAME.fullmatch(base):
        name, revision = on_hub.groups()
    layers = adapters(model)
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": revision,
        "fan_in_fan_out": model.shape.family_row.transposes,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "target_modules": layer_names(model, layers),
    }
    return {
        hf.ADAPTER_FILE: partial(hf.write_tensors, tensors),
        hf.ADAPTER_CONFIG: lambda path: path.write_text(json.dumps(settings, indent=1)),
    }


def load_peft(model: Transformer, folder: Path) -> None:
    """Load PEFT's adapters into a model that has the same ones. Raises ConfigError."""
    tensors = hf.read_tensors(folder / hf.ADAPTER_FILE)
    ours = {peft_name(model.shape, name): name for name in trained_state(model)}
    state = {ours.get(stored, stored): tensor for stored, tensor in tensors.items()}
    with refusing(f"{folder}: the adapters are for another model, or are not supported"):
        load_trained_state(model, state)


def attach_peft(model: Transformer, folder: Path) -> None:
    """Freeze a model, and add the adapters in a folder to its layers. Raises ConfigError."""
    settings = hf.AdapterSettings.read(folder)
    for name, value in read_json(folder / hf.ADAPTER_CONFIG).items():
        if value and name not in HARMLESS and value not in SUPPORTED.get(name, ()):
            raise ConfigError(f"{folder}: adapters with {name} {value!r} are not supported")
    stored = hf.read_tensors(folder / hf.ADAPTER_FILE)
    modules = dict(model.named_modules())
    layers = [name for name in modules if peft_name(model.shape, f"{name}.lora_A") in stored]
    with refusing(folder / hf.ADAPTER_CONFIG):
        add_adapters(model, settings.r, settings.alpha, ",".join(layers))
    load_peft(model, folder)

"""Models' files as Hugging Face lays them out.

A model is refused if transformer.py would compute another function than the one that was trained.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, PositiveInt, TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, refusing
from ..hub import CONFIG, read_json
from .families import FAMILIES, FULL, OLD_WORDS, WINDOWED
from .shape import ModelShape, PositiveFinite

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # says which tensors are in which of several files
# what PEFT writes
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FOR_TRANSFORMERS = {"format": "pt"}  # the header that transformers expects
SHAPE = "shape"  # key of the header of a file of our own: the fields of ModelShape as JSON
# endings of the names of weights that are stored as [in, out]; only GPT-2 has them
TRANSPOSED = ("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight")
# stored by older versions, and not needed
BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")
# Numbers of other types are not the weights themselves: their scales are stored apart.
NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = TypeAdapter(ModelShape)  # refuses values that no model has, and ignores other names


def stored_name(shape: ModelShape, name: str) -> str:
    """The name in files of a parameter here."""
    names = shape.family_row.names
    return ".".join(names.get(part, part) for part in name.split("."))


@refusing(CONFIG)
def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a config.json describes. Raises ConfigError."""
    name = config["model_type"]
    if name not in FAMILIES:
        raise ValueError(f"model_type is {name!r}, not {' or '.join(FAMILIES)}")
    family = FAMILIES[name]
    # 1. The rotary positions: version 4 of transformers has fields, 5 `rope_parameters`, for some
    # families one for each kind of layer.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = rope.get(WINDOWED) or {}
    rope = rope.get(FULL, rope)
    not_null = {name: value for name, value in config.items() if value is not None}
    config = {**family.missing, **not_null, **rope}
    if local:
        config["rope_local_base_freq"] = local["rope_theta"]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    # 2. The shape. Older files say which layers have a window by a number alone.
    fields = {ours: config.get(theirs, 0) for ours, theirs in family.fields.items()}
    of_layers: list[str] = []
    if family.names_layers:
        of_layers = [OLD_WORDS.get(word, word) for word in config.get("layer_types") or ()]
    if WINDOWED in of_layers and FULL in of_layers:
        fields["full_every"] = 1 + of_layers.index(FULL)
    scaling = rope if rope_type == "llama3" else None
    shape = SHAPES.validate_python({**fields, "family": name, "rope_scaling": scaling})
    # 3. What transformer.py would compute otherwise.
    rotated_layers = [int(shape.rope_theta_of(n) > 0) for n in range(shape.layers)]
    stated = {**config, "rope_type": rope_type, "layer_types": of_layers}
    supported = {
        "quantization_config": [None],
        "rope_type": ("default", "llama3"),
        "no_rope_layers": (None, rotated_layers),
        "layer_types": ([], layer_types(shape)),
        **family.supported,
    }
    for name, values in supported.items():
        if name in stated and stated[name] not in values:
            raise ValueError(f"{name} is {stated[name]!r}, not {' or '.join(map(str, values))}")
    return shape


def layer_types(shape: ModelShape) -> list[str]:
    """What config.json says of each layer."""
    return [WINDOWED if shape.window_of(layer) else FULL for layer in range(shape.layers)]


def write_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json, in words that versions 4 and 5 of transformers read."""
    written = {
        "architectures": [shape.family_row.architecture],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in shape.family_row.fields.items()},
        **{theirs: values[0] for theirs, values in shape.family_row.supported.items()},
        # some families have defaults beyond the vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if shape.family_row.is_gpt2:
        # transformers would train with its default of 0.1
        return {**written, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    scaling = shape.rope_scaling and {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    if shape.family_row.names_layers:
        written["layer_types"] = layer_types(shape)
    return {**written, "rope_scaling": scaling, "sliding_window": shape.window or None}


def read_model(path: Path) -> tuple[ModelShape, dict[str, Tensor] | None]:
    """The shape of a model, and its tensors by their names in files, or None if it has none."""
    files = weight_files(path / WEIGHTS if path.is_dir() else path)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_tensors(file)
    return read_model_shape(path), tensors if files else None


def read_model_shape(path: Path) -> ModelShape:
    """The shape alone, by a safetensors file's header, else by config.json. Raises ConfigError."""
    file = path / WEIGHTS if path.is_dir() else path
    if file.is_file():
        with refusing(file), safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
        if SHAPE in header:
            return SHAPES.validate_json(header[SHAPE])
    return read_shape(read_json(file.with_name(CONFIG)))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file. Raises ConfigError for values that cannot be weights."""
    with refusing(file):
        tensors = {name: x for name, x in load_file(file).items() if not BUFFERS.fullmatch(name)}
        if not tensors:
            raise ConfigError("has no tensors")
        for name, tensor in tensors.items():
            if tensor.dtype not in NUMBER_TYPES:
                raise ConfigError(f"{name} is stored as {tensor.dtype}, which is not supported")
            if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                raise ConfigError(f"{name} has values that are not finite")
        return tensors


def weight_files(file: Path) -> list[Path]:
    """One file or the shards that the index lists; none beside a config.json alone."""
    folder = file.parent
    if file.exists() or file.name != WEIGHTS:
        return [file]
    index = folder / INDEX
    if index.exists():
        weight_map: Any = read_json(index).get("weight_map")  # name of a tensor -> name of its file
        with refusing(index):
            return sorted({folder / name for name in weight_map.values()}) or [file]
    # random weights, unless there are others that are not read
    endings = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
    others = [other.name for other in folder.glob("*") if other.name.endswith(endings)]
    if others or not (folder / CONFIG).exists():
        raise ConfigError(f"{folder}: has no {WEIGHTS}, only {', '.join(others) or 'other files'}")
    return []


def to_state(
    shape: ModelShape, names: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `read_model` as a state dict with the parameters' `names`; others stay."""
    ours = {stored_name(shape, name): name for name in names}
    state: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix(shape.family_row.prefix)
        state[ours.get(name, name)] = converted(shape, name, tensor)
    head = state.get("lm_head.weight")
    embedding = state.get("wte.weight")
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del state["lm_head.weight"]  # some store the head although it is tied
    return state


def converted(shape: ModelShape, name: str, tensor: Tensor, to_file: bool = False) -> Tensor:
    """A tensor of a file as a parameter, or with `to_file` the other way round."""
    if shape.family_row.norms_add_one and tensor.dim() == 1:
        return tensor.float() + (-1 if to_file else 1)
    return tensor.t() if name.endswith(TRANSPOSED) else tensor


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str] = FOR_TRANSFORMERS
) -> None:
    """Write float32 tensors, and one header entry: the package writes more in changing order."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; the package's own lets nobody else read the file
    plain = {name: x.detach().float().cpu().contiguous() for name, x in tensors.items()}
    save_file(plain, path, metadata=dict(header))
    path.chmod(mode)


class AdapterSettings(BaseModel):
    """The settings of adapter_config.json that are read, with the defaults of PEFT."""

    base_model_name_or_path: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    r: PositiveInt = 8
    lora_alpha: PositiveFinite = 8
    use_rslora: bool = False
    target_modules: list[str] | str | None = None  # names of layers, or a pattern

    @property
    def alpha(self) -> float:
        """What --lora-alpha means: adapters are scaled by this over their rank."""
        return self.lora_alpha * (self.r**0.5 if self.use_rslora else 1)

    @classmethod
    def read(cls, folder: Path) -> "AdapterSettings":
        """The settings of PEFT's adapters in a folder. Raises ConfigError."""
        settings = read_json(folder / ADAPTER_CONFIG)
        with refusing(folder / ADAPTER_CONFIG):
            return cls.model_validate(settings)


def base_of(folder: Path) -> str:
    """The name of the model that PEFT's adapters in a folder belong to; "" if it has none."""
    if not (folder / ADAPTER_CONFIG).exists():
        return ""
    settings = AdapterSettings.read(folder)
    name = os.path.expanduser(settings.base_model_name_or_path)
    for path in (Path(name), folder / name):  # a relative one may begin in the adapters' folder
        if path.exists():
            return str(path)
    return f"{name}@{settings.revision}" if settings.revision else name

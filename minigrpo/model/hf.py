"""Models' files as Hugging Face lays them out, and models on its Hub.

A model is refused if transformer.py would compute another function than the one that was trained:
loading it anyway would give a model that runs but writes nonsense.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt, TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, refusing
from .families import FAMILIES, FULL, OLD_WORDS, WINDOWED
from .shape import ModelShape, PositiveFinite

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # says which tensors are in which of several files
CONFIG = "config.json"
# what PEFT writes
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FOR_TRANSFORMERS = {"format": "pt"}  # the header that transformers expects
SHAPE = "shape"  # key of the header of a file of our own: the fields of ModelShape as JSON


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    with refusing(file):
        found = json.loads(file.read_bytes()) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError("is no JSON object")
        return found


# ends of names whose weights are stored as [in, out]; only GPT-2 has them
TRANSPOSED = ("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight")
# stored by older versions, and not needed
BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")


def stored_name(shape: ModelShape, name: str) -> str:
    """The name in files of a parameter here."""
    names = shape.kind.names
    return ".".join(names.get(part, part) for part in name.split("."))


SHAPES = TypeAdapter(ModelShape)  # refuses values that no model has, and ignores other names


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
    stated = {name: value for name, value in config.items() if value is not None}
    config = {**family.missing, **stated, **rope}
    if local:
        config["rope_local_base_freq"] = local["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    # 2. The shape. Older files say which layers have a window by a number alone.
    fields = {ours: config.get(theirs, 0) for ours, theirs in family.fields.items()}
    of_layers: list[str] = []
    if family.names_layers:
        of_layers = [OLD_WORDS.get(word, word) for word in config.get("layer_types") or ()]
    if WINDOWED in of_layers and FULL in of_layers:
        fields["full_every"] = 1 + of_layers.index(FULL)
    scaling = rope if kind == "llama3" else None
    shape = SHAPES.validate_python({**fields, "family": name, "rope_scaling": scaling})
    # 3. What transformer.py would compute otherwise.
    said = {**config, "rope_type": kind, "layer_types": of_layers}
    supported = {
        "quantization_config": [None],
        "rope_type": ("default", "llama3"),
        "no_rope_layers": (None, [int(shape.rope_theta_of(n) > 0) for n in range(shape.layers)]),
        "layer_types": ([], layer_types(shape)),
        **family.supported,
    }
    for name, values in supported.items():
        if name in said and said[name] not in values:
            raise ValueError(f"{name} is {said[name]!r}, not {' or '.join(map(str, values))}")
    return shape


def layer_types(shape: ModelShape) -> list[str]:
    """What config.json says of each layer."""
    return [WINDOWED if shape.window_of(layer) else FULL for layer in range(shape.layers)]


def write_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json, in words that versions 4 and 5 of transformers read."""
    written = {
        "architectures": [shape.kind.architecture],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in shape.kind.fields.items()},
        **{theirs: values[0] for theirs, values in shape.kind.supported.items()},
        # some families have defaults beyond the vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if shape.kind.is_gpt2:
        # transformers would train with its default of 0.1
        return {**written, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    scaling = shape.rope_scaling and {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    if shape.kind.names_layers:
        written["layer_types"] = layer_types(shape)
    return {**written, "rope_scaling": scaling, "sliding_window": shape.window or None}


def read_model(path: Path) -> tuple[ModelShape, dict[str, Tensor] | None]:
    """The shape of a model, and its tensors by their names in files. Raises ConfigError.

    The tensors are None beside a config.json alone.
    """
    files = _weight_files(path / WEIGHTS if path.is_dir() else path)
    tensors: dict[str, Tensor] = {}
    for part in files:
        tensors |= read_tensors(part)
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


# Numbers of other types are not the weights themselves: their scales are stored apart.
NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


# an index's names of tensors -> names of files, which lie beside it
SHARDS = TypeAdapter(
    Annotated[
        dict[str, Annotated[str, Field(pattern=r"^[^/\\]+\.safetensors$")]], Field(min_length=1)
    ]
)


def _weight_files(file: Path) -> list[Path]:
    """One file or the shards that the index lists; none beside a config.json alone."""
    folder = file.parent
    if file.exists() or file.name != WEIGHTS:
        return [file]
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        with refusing(index):
            shards = SHARDS.validate_python(weight_map)
        return [folder / name for name in sorted({*shards.values()})]
    # random weights, unless there are others that are not read
    kinds = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
    others = [other.name for other in folder.glob("*") if other.name.endswith(kinds)]
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
        name = stored.removeprefix(shape.kind.prefix)
        state[ours.get(name, name)] = converted(shape, name, tensor, 1)
    head, embedding = state.get("lm_head.weight"), state.get("wte.weight")
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del state["lm_head.weight"]  # some store the head although it is tied
    return state


def converted(shape: ModelShape, name: str, tensor: Tensor, one: int) -> Tensor:
    """A tensor of a file as a parameter, or with `one` = -1 the other way round."""
    if shape.kind.norms_add_one and tensor.dim() == 1:
        return tensor.float() + one
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


# ORG/NAME or ORG/NAME@REVISION
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def hub_folder(name: str | Path, *, weights: bool = True) -> Path:
    """The file or folder that a name stands for; ORG/NAME[@REVISION] is fetched from the Hub.

    An existing path comes first. The name of a folder from the Hub is the commit. Without `weights`
    it has only settings and the tokenizer. Raises ConfigError.
    """
    on_hub = HUB_NAME.fullmatch(str(name))
    if Path(name).exists() or on_hub is None:
        return Path(name)
    with refusing(f"{name}: no such folder, nor on the Hub (which needs minigrpo[hub])"):
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, on_hub[1], ignore_patterns="*/*")
        settings = ["*.json", "*.jinja", "tokenizer.model"]
        folder = Path(fetch(revision=on_hub[2], allow_patterns=settings))
    if weights and base_of(folder):
        fetch(revision=folder.name, allow_patterns=ADAPTER_FILE)
    elif weights:
        read_shape(read_json(folder / CONFIG))  # a model that is refused costs no gigabytes
        fetch(revision=folder.name, allow_patterns="model*.safetensors")
        if not _weight_files(folder / WEIGHTS):
            raise ConfigError(f"{name}: has no safetensors, or they are not here")
    return folder


@dataclass(frozen=True)
class AdapterSettings:
    """What is read of adapter_config.json, with the names, types and defaults of PEFT."""

    base_model_name_or_path: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    r: PositiveInt = 8
    lora_alpha: PositiveFinite = 8
    use_rslora: bool = False


ADAPTER_SETTINGS = TypeAdapter(AdapterSettings)


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """The settings of PEFT's adapters in a folder. Raises ConfigError."""
    settings = read_json(folder / ADAPTER_CONFIG)
    with refusing(folder / ADAPTER_CONFIG):
        return ADAPTER_SETTINGS.validate_python(settings)


def base_of(folder: Path) -> str:
    """The name of the model that PEFT's adapters in a folder belong to; "" if it has none."""
    if not (folder / ADAPTER_CONFIG).exists():
        return ""
    settings = read_adapter_settings(folder)
    name = os.path.expanduser(settings.base_model_name_or_path)
    for path in (Path(name), folder / name):  # a relative one may begin in the adapters' folder
        if path.exists():
            return str(path)
    return f"{name}@{settings.revision}" if settings.revision else name


def lineage(name: str) -> Iterator[tuple[str, Path]]:
    """A model's name and folder, without weights; of adapters, then those of the base, and so on.

    Raises ConfigError for adapters that belong to themselves.
    """
    seen: set[Path] = set()
    while name:
        folder = hub_folder(name, weights=False)
        if folder.resolve() in seen:
            raise ConfigError(f"{folder}: the adapters have no base but themselves")
        seen.add(folder.resolve())
        yield name, folder
        name = base_of(folder)

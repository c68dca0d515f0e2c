"""The weights of models, in files as Hugging Face lays them out."""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field, PositiveInt
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, refusing
from ..hub import CONFIG, read_json
from .config_json import SHAPES, read_shape
from .shape import ModelShape, PositiveFinite

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # says which tensors are in which of several files
# what PEFT writes
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FOR_TRANSFORMERS = {"format": "pt"}  # the header that transformers expects
SHAPE = "shape"  # key of the header of a file of our own: the fields of ModelShape as JSON
NORM = re.compile(r"\b(ln_\w+|[qk]_norm)\.weight$")  # the norms of all families, by our names
# stored by older versions, and not needed
BUFFERS = r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)"
# what a model has beside its text: towers for images, and heads for several tokens at once
OTHER_PARTS = r"(model\.)?(visual|vision_tower|multi_modal_projector)\..*|mtp\..*"
SKIPPED = re.compile(f"{BUFFERS}|{OTHER_PARTS}")
# a part of a stored name -> what transformers reads it as; the first is of a text model in another
RENAMED = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"\.self_attn\.gate_proj\.": ".self_attn.g_proj.",
}
# Numbers of other types are not the weights themselves: their scales are stored apart.
NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stored_name(shape: ModelShape, name: str) -> str:
    names = shape.family_row.names
    return ".".join(names.get(part, part) for part in name.split("."))


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
        tensors = {name: x for name, x in load_file(file).items() if not SKIPPED.fullmatch(name)}
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
        with refusing(index):
            names = read_json(index)["weight_map"].values()  # by tensor
            return sorted({folder / name for name in names}) or [file]
    # random weights, unless there are others that are not read
    endings = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
    others = [other.name for other in folder.glob("*") if other.name.endswith(endings)]
    if others or not (folder / CONFIG).exists():
        found = ", ".join(others) or "other files"
        advice = "; examples/from_gguf.py converts .gguf" if ".gguf" in found else ""
        raise ConfigError(f"{folder}: has no {WEIGHTS}, only {found}{advice}")
    return []


def to_state(
    shape: ModelShape, names: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `read_model` as a state dict with the parameters' `names`; others stay."""
    ours = {stored_name(shape, name): name for name in names}
    state: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        for pattern, new in RENAMED.items():
            stored = re.sub(pattern, new, stored)
        stored = stored.removeprefix(shape.family_row.prefix)
        name = ours.get(stored, stored)
        state[name] = converted(shape, name, tensor)
    head = state.get("lm_head.weight")
    embedding = state.get("wte.weight")
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del state["lm_head.weight"]  # some store the head although it is tied
    return state


def converted(
    shape: ModelShape,
    name: str,
    tensor: Tensor,
    to_file: bool = False,
) -> Tensor:
    """A tensor of a file as a parameter, or with `to_file` the other way round."""
    family = shape.family_row
    if family.norms_add_one and NORM.search(name):
        return tensor.float() + (-1 if to_file else 1)
    is_linear = name.startswith("h.") and tensor.dim() == 2
    return tensor.t() if family.transposes and is_linear else tensor


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

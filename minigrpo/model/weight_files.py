"""The files of a model, as Hugging Face lays them out: safetensors, whole or in shards, and config.

Nothing is read before it is asked for: names, shapes and types come from the files' headers, and a
tensor is read when it is used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..runtime.text import parse_json, quoted

Settings = Mapping[str, Any]  # config.json
Fields = dict[str, Any]  # of ModelShape
Problems = list[str]
WEIGHTS, CONFIG = "model.safetensors", "config.json"  # the files of a model's folder
INDEX = "model.safetensors.index.json"  # which shard holds a tensor
PICKLED = (
    "pickled weights, which can run code when they are read; write them as safetensors once, with "
    "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)
OTHER_FORMATS = {  # names of files without safetensors of a whole model -> what they hold
    "adapter_model.*": "adapters without their base model; merge them into it, and take the result",
    "*model*.bin": PICKLED,
    **dict.fromkeys(("*.pth", "*.pt", "*.ckpt"), PICKLED),
    "*.gguf": "weights for llama.cpp; take the safetensors that they were made from",
}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file. Raises ValueError, naming the file."""
    try:
        found = parse_json(file.read_bytes()) if file.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    return found


def write_tensors(path: Path, tensors: dict[str, Tensor], header: Mapping[str, str]) -> None:
    """Write safetensors with a text header. Equal contents make equal files.

    The safetensors package writes the entries of the header in an order that changes from call to
    call, and a file that nobody else may read; here they are sorted, and the umask decides.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **header})
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(size))
        found["__metadata__"] = dict(sorted(found["__metadata__"].items()))
        file.seek(8)
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
        file.write(text.encode().ljust(size))
    path.chmod(mode)


def weight_names(folder: Path) -> list[str]:
    """The files with a model's weights, there or not: one, or the shards that the index lists.

    Raises ValueError for an index that cannot be read.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return [WEIGHTS]
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index}: has no weight_map")
    names = sorted({str(name) for name in found.values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index}: {quoted(outside[0])} is no file beside it")
    return names


def other_format(path: Path) -> str:
    """What a file, or a folder, holds instead of safetensors, as the end of a message, or ""."""
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    found = ((name, what) for part, what in OTHER_FORMATS.items() for name in matching(names, part))
    return next((f"; {name} holds {what}" for name, what in found), "")


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model by their stored name, and what its header and config.json say."""

    path: Path  # as the user gave it
    shards: Mapping[str, Path]  # stored name -> file
    header: Mapping[str, str]  # the metadata of the (first) safetensors file
    settings: Mapping[str, Any]  # config.json; empty if there is none
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # as safetensors writes them: F32, BF16

    @classmethod
    def open(cls, path: Path) -> "WeightFiles":
        """Read the headers of a file, or of a folder's files. Raises ValueError in one line."""
        file = path / WEIGHTS if path.is_dir() else path
        settings, names = dict[str, Any](), [file.name]
        if file.name == WEIGHTS:
            settings, names = read_json(file.with_name(CONFIG)), weight_names(file.parent)
        shards: dict[str, Path] = {}
        header: dict[str, str] = {}
        shapes, dtypes = dict[str, list[int]](), dict[str, str]()
        for one in map(file.with_name, names):
            with _opened(one) as tensors:
                header = header or tensors.metadata() or {}
                for name in tensors.keys():  # noqa: SIM118 - it is not a dict
                    if name in shards:
                        raise ValueError(f"{one}: {name} is also in {shards[name].name}")
                    part = tensors.get_slice(name)
                    shards[name] = one
                    shapes[name], dtypes[name] = part.get_shape(), part.get_dtype()
        return cls(path, shards, header, settings, shapes, dtypes)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, by its stored name."""
        with _opened(self.shards[name]) as tensors:
            return tensors.get_tensor(name)


class _opened:
    """`safe_open`, whose errors name the file in one line."""

    def __init__(self, file: Path) -> None:
        if file.exists() and not file.is_file():  # opening a pipe would wait forever
            raise ValueError(f"{file}: is not a regular file")
        try:
            self.file = safe_open(file, framework="pt")
        except FileNotFoundError:
            held = other_format(file.parent) if file.name == WEIGHTS else ""
            raise ValueError(f"{file}: there is no such file{held}") from None
        except (SafetensorError, OSError) as error:
            held = other_format(file)
            raise ValueError(f"{file}: not a whole safetensors file ({error}){held}") from None

    def __enter__(self) -> Any:
        return self.file.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.file.__exit__(*raised)


def uncomputed(settings: Settings, computed: Mapping[str, tuple[Any, ...]]) -> Problems:
    """Settings under which a model computes something else than `computed` says."""
    return [
        f"{name} in {CONFIG} is {quoted(settings[name])}, not {values[0]!r}"
        for name, values in computed.items()
        if settings.get(name, values[0]) not in values
    ]

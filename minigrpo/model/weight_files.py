"""The files of a model, as Hugging Face lays them out: safetensors, whole or in shards, and config.

Nothing is read before it is asked for: names, shapes and types come from the files' headers, and a
tensor is read when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..runtime.text import parse_json, quoted

Settings = Mapping[str, Any]  # config.json
Fields = dict[str, Any]  # of ModelShape
Problems = list[str]
WEIGHTS, CONFIG = "model.safetensors", "config.json"  # the files of a model's folder
INDEX = "model.safetensors.index.json"  # which shard holds a tensor


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file. Raises ValueError, naming the file."""
    try:
        found = parse_json(file.read_bytes()) if file.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    return found


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
        settings = read_json(file.with_name(CONFIG)) if file.name == WEIGHTS else {}
        index = file.with_name(INDEX)
        files = [file]
        if file.name == WEIGHTS and not file.exists() and index.exists():
            found = read_json(index).get("weight_map")
            if not isinstance(found, dict) or not found:
                raise ValueError(f"{index}: has no weight_map")
            files = [file.with_name(str(name)) for name in sorted(set(found.values()))]
        shards: dict[str, Path] = {}
        header: dict[str, str] = {}
        shapes, dtypes = dict[str, list[int]](), dict[str, str]()
        for one in files:
            with _opened(one) as tensors:
                header = header or tensors.metadata() or {}
                for name in tensors.keys():  # noqa: SIM118 - it is not a dict
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
            raise ValueError(f"{file}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error})") from None

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

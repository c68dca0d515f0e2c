"""Load and save a Transformer's parameters as safetensors, in the layout of its family.

The linear weights of Hugging Face's GPT-2 are stored as `[in, out]`, torch's as `[out, in]`. A tied
output head is not stored. A file with missing, unknown or misshapen tensors, integers, or numbers
that are not finite is rejected, in one line that lists all problems.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from .families import FAMILIES, SHAPE, Family
from .shape import ModelShape
from .weight_files import CONFIG, WEIGHTS, WeightFiles, write_tensors

LM_HEAD = "lm_head.weight"  # stored by some although it is tied
MAX_LISTED = 8  # problems in an error message
CHECKED_AT_ONCE = 2**18  # values
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def load_into(
    state: Mapping[str, Tensor], files: WeightFiles, shape: ModelShape, problems: Sequence[str]
) -> None:
    """Copy the stored tensors into `state`, a Transformer's state dict, one after the other.

    Raises:
        ValueError: in one line that lists `problems` and all tensors that do not fit; before
            anything is read, except for numbers that are not finite.
    """
    family = FAMILIES[shape.family]
    stored = {
        family.ours(name): name for name in files.shapes if not re.fullmatch(family.buffers, name)
    }
    named = {*stored.values()}
    twice = [
        f"{name} and {stored[family.ours(name)]} are the same parameter"
        for name in files.shapes
        if name not in named and family.ours(name) in stored
    ]
    head = stored.pop("head.weight", None) if shape.tied else None
    found = [*problems, *twice, *_misfits(state, files, stored, family)]
    if shape.tied and head is None and files.settings.get("tie_word_embeddings") is False:
        found.append(f"{LM_HEAD} is missing, and not tied")
    if head and "wte.weight" in stored:
        same = files.shapes[head] == files.shapes[stored["wte.weight"]]
        if not same or not torch.equal(files.tensor(head), files.tensor(stored["wte.weight"])):
            wte = stored["wte.weight"].removeprefix(family.prefix)
            found.append(f"{head} is not {wte}: an untied head")
    _refuse(files, found)
    for name, parameter in state.items():
        _copy(parameter, files.tensor(stored[name]), transpose=name.endswith(family.transposed))
        if bad := _count_not_finite(parameter):
            found.append(f"{stored[name]} has {bad} values that are not finite in float32")
    _refuse(files, found)


def _copy(parameter: Tensor, tensor: Tensor, *, transpose: bool) -> None:
    """A function, so that `tensor` is freed before the next one is read."""
    parameter.copy_(tensor.t() if transpose else tensor)


def _count_not_finite(x: Tensor) -> int:
    """In pieces: `isfinite` needs a copy, and that of a large embedding is hundreds of MiB."""
    return sum(
        len(part) - int(part.isfinite().sum()) for part in x.flatten().split(CHECKED_AT_ONCE)
    )


def _refuse(files: WeightFiles, problems: Sequence[str]) -> None:
    if not problems:
        return
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    listed = "; ".join(problems[:MAX_LISTED])
    raise ValueError(f"{files.path}: does not fit this model: {listed}{more}")


def _misfits(
    state: Mapping[str, Tensor], files: WeightFiles, stored: Mapping[str, str], family: Family
) -> Iterator[str]:
    """What is wrong with the names, shapes and types of the tensors, as the files call them."""
    prefix = family.prefix if any(name.startswith(family.prefix) for name in files.shapes) else ""
    missing = (name for name in state if name not in stored)
    yield from (f"{prefix}{family.theirs(name)} is missing" for name in missing)
    yield from (f"{theirs} is unknown" for name, theirs in stored.items() if name not in state)
    for name, parameter in state.items():
        if name not in stored:
            continue
        theirs, expected = stored[name], list(parameter.shape)
        expected = expected[::-1] if name.endswith(family.transposed) else expected
        if files.shapes[theirs] != expected:
            yield f"{theirs} is {files.shapes[theirs]}, not {expected}"
        elif files.dtypes[theirs] not in FLOATS:
            yield f"{theirs} is {files.dtypes[theirs]}, not a float"


def save_weights(state: Mapping[str, Tensor], shape: ModelShape, path: Path) -> None:
    """Write a Transformer's state dict as float32, with its shape in the file's header."""
    family = FAMILIES[shape.family]
    # Hugging Face's GPT-2 has no field for the shape; the number of heads is not seen in tensors
    header = {"heads": str(shape.heads)}
    if shape.family != "gpt2":
        header = {SHAPE: json.dumps(asdict(shape))}
    _save(state, family, path, header)


def export_model(
    state: Mapping[str, Tensor],
    folder: Path,
    *,
    shape: ModelShape,
    eos: int,
    bos: int | None = None,
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM` and `from_pretrained` load.

    Args:
        state: a Transformer's state dict.
        eos: the token that ends a completion.
        bos: the token that a text begins with; None: the same.
    """
    family = FAMILIES[shape.family]
    folder.mkdir(parents=True, exist_ok=True)
    header = {"heads": str(shape.heads)} if shape.family == "gpt2" else {}
    _save(state, family, folder / WEIGHTS, header)
    settings = {
        "architectures": [family.architecture],
        **family.write(shape),
        **dict.fromkeys(("eos_token_id", "pad_token_id"), eos),
        "bos_token_id": eos if bos is None else bos,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")


def _save(state: Mapping[str, Tensor], family: Family, path: Path, header: dict[str, str]) -> None:
    """Write float32 tensors under the family's names."""
    tensors = {
        family.theirs(name): (x.t() if name.endswith(family.transposed) else x)
        .detach()
        .float()
        .cpu()
        .contiguous()
        for name, x in state.items()
    }
    write_tensors(path, tensors, header)

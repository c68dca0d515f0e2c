"""Load and save GPT-2 weights as safetensors in Hugging Face's layout, the library's only format.

Hugging Face's GPT-2 stores linear weights as `[in, out]`, torch as `[out, in]`. The output head is
tied to the token embedding and therefore not stored. Files from other tools may prefix names with
`transformer.` and include causal masks.

A file is rejected if transformer.py would compute a different function from the one that was
trained: another activation or layer norm epsilon, an untied head, missing, unknown or misshapen
tensors, integer weights, values that are not finite. Loading it anyway would give a model that runs
but writes nonsense. The one-line error lists all problems.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..runtime.text import parse_json, quoted

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # the files of a model's folder
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # stored by older transformers
LM_HEAD = "lm_head.weight"
HEAD_SIZE = 64  # of every published GPT-2
MAX_LISTED = 8  # problems in an error message

# What transformer.py computes, in the terms of config.json. The first value is written to exports;
# the others are equivalent.
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# the fields of ModelShape -> their names in config.json
SIZES = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
}


def stored_shapes(vocab_size: int, context: int, layers: int, width: int) -> dict[str, list[int]]:
    """Return the name and the shape of every parameter, as stored in a file."""
    shapes = {"wte.weight": [vocab_size, width], "wpe.weight": [context, width]}
    linear = {  # (in, out), as multiples of the width
        "attn.c_attn": (1, 3),
        "attn.c_proj": (1, 1),
        "mlp.c_fc": (1, 4),
        "mlp.c_proj": (4, 1),
    }
    for block in (f"h.{i}." for i in range(layers)):
        for name, (size_in, size_out) in linear.items():
            shapes |= {
                f"{block}{name}.weight": [size_in * width, size_out * width],
                f"{block}{name}.bias": [size_out * width],
            }
        shapes |= {
            f"{block}{name}.{part}": [width]
            for name in ("ln_1", "ln_2")
            for part in ("weight", "bias")
        }
    return {**shapes, "ln_f.weight": [width], "ln_f.bias": [width]}


def _transpose(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x.t().contiguous() if name.endswith(TRANSPOSED) else x for name, x in state.items()
    }


def save_gpt2(state: dict[str, Tensor], path: Path, *, heads: int) -> None:
    """Write a Transformer's state dict as float32. The number of heads goes into the file's header,
    because it cannot be read off the shapes.
    """
    save_file(
        _transpose({name: x.detach().float().cpu().contiguous() for name, x in state.items()}),
        path,
        metadata={"format": "pt", "heads": str(heads)},
    )


def export_gpt2(
    state: dict[str, Tensor], folder: Path, *, shape: Mapping[str, int], eos: int
) -> None:
    """Write a folder that `load_gpt2` and transformers' `GPT2LMHeadModel.from_pretrained` load.

    Args:
        state: a Transformer's state dict.
        shape: the fields of `ModelShape`.
        eos: the token that ends a completion.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_gpt2(state, folder / WEIGHTS, heads=shape["heads"])
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in COMPUTED.items()},
        **{theirs: shape[ours] for ours, theirs in SIZES.items()},
        **dict.fromkeys(("bos_token_id", "eos_token_id"), eos),
        "tie_word_embeddings": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")


def load_gpt2(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Read a GPT-2 safetensors file, or the `model.safetensors` of a folder.

    The number of heads comes from the file's header, else from the config.json next to a
    `model.safetensors`, else it is width / 64.

    Returns:
        The fields of `ModelShape`, and the state dict in float32.

    Raises:
        ValueError: in one line, for a file that is missing, damaged, or not exactly the model that
            `Transformer` computes; see the module's docstring.
    """
    file = path / WEIGHTS if path.is_dir() else path
    header, state = _read(file)
    settings = _settings(file.with_name(CONFIG)) if file.name == WEIGHTS else {}
    problems = [
        f"{name} in {CONFIG} is {quoted(settings[name])}, not {values[0]!r}"
        for name, values in COMPUTED.items()
        if settings.get(name, values[0]) not in values
    ]
    problems += _untied(state, settings)
    try:
        (vocab_size, width), (context, _) = state["wte.weight"].shape, state["wpe.weight"].shape
    except (KeyError, ValueError):
        problems.append("wte.weight [V, D] and wpe.weight [T, D] expected")
        raise ValueError(f"{path}: not a GPT-2: {'; '.join(problems)}") from None
    sizes = {"vocab_size": vocab_size, "context": context, "width": width}
    sizes["layers"] = len({name.split(".")[1] for name in state if re.match(r"h\.\d+\.", name)})
    heads = header.get("heads", settings.get(SIZES["heads"], max(1, width // HEAD_SIZE)))
    sizes["heads"] = int(heads) if str(heads).isdecimal() else 0
    if not sizes["heads"] or width % sizes["heads"]:
        problems.append(f"{heads} heads do not divide a width of {width}")
    problems += [
        f"{theirs} in {CONFIG} is {quoted(settings[theirs])}, in {file.name} {sizes[ours]}"
        for ours, theirs in SIZES.items()
        if settings.get(theirs, sizes[ours]) != sizes[ours]
    ]
    problems += _misfits(state, stored_shapes(vocab_size, context, sizes["layers"], width))
    state = {name: x.to(torch.float32) for name, x in state.items()}
    problems += [
        f"{name} has {bad} values that are not finite in float32"
        for name, x in state.items()
        if (bad := x.numel() - int(x.isfinite().sum()))
    ]
    if problems:
        more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        listed = "; ".join(problems[:MAX_LISTED])
        raise ValueError(f"{path}: does not fit this GPT-2: {listed}{more}")
    return sizes, _transpose(state)


def _read(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata in the file's header, and its tensors: without the masks, and with
    `transformer.` removed from their names.
    """
    if file.exists() and not file.is_file():  # opening a pipe would wait forever
        raise ValueError(f"{file}: is not a regular file")
    try:
        with safe_open(file, framework="pt") as tensors:
            keys = list(tensors.keys())
            names = {name: name.removeprefix("transformer.") for name in keys}
            kept = {
                short: tensors.get_tensor(name)
                for name, short in names.items()
                if not MASKS.fullmatch(short)
            }
            return tensors.metadata() or {}, kept
    except FileNotFoundError:
        raise ValueError(f"{file}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from None


def _settings(file: Path) -> dict[str, Any]:
    """The contents of config.json; empty if there is none."""
    try:
        settings = parse_json(file.read_bytes()) if file.exists() else {}
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    return settings


def _untied(state: dict[str, Tensor], settings: Mapping[str, Any]) -> list[str]:
    """Remove the output head from `state`, and return a problem if it is not tied."""
    lm_head, wte = state.pop(LM_HEAD, None), state.get("wte.weight")
    if lm_head is None:
        is_lost = settings.get("tie_word_embeddings") is False
        return [f"{LM_HEAD} is missing, and not tied"] if is_lost else []
    tied = wte is not None and lm_head.shape == wte.shape and bool((lm_head == wte).all())
    return [] if tied else [f"{LM_HEAD} is not wte.weight: an untied head"]


def _misfits(state: Mapping[str, Tensor], expected: Mapping[str, list[int]]) -> list[str]:
    """What is wrong with the names, shapes and types of the tensors."""
    found = [f"{name} is missing" for name in expected if name not in state]
    found += [f"{name} is unknown" for name in state if name not in expected]
    for name, shape in expected.items():
        if name in state and list(state[name].shape) != shape:
            found.append(f"{name} is {list(state[name].shape)}, not {shape}")
        elif name in state and not state[name].is_floating_point():
            found.append(f"{name} is {state[name].dtype}")
    return found

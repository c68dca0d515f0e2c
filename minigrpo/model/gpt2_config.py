"""GPT-2's config.json: how it becomes a `ModelShape`, and how it is written."""

import re
from collections.abc import Mapping
from typing import Any

from ..runtime.text import quoted
from .shape import ModelShape
from .weight_files import CONFIG, WEIGHTS, Fields, Problems, WeightFiles, uncomputed

HEAD_SIZE = 64  # of every published GPT-2
PREFIX = "transformer."  # that names of tensors may have
# What the GPT-2 here computes, in the terms of config.json. The first value is written to exports;
# the others are equivalent.
GPT2_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# the fields of ModelShape -> their names in config.json
GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
}


def read_gpt2(files: WeightFiles) -> tuple[Fields, Problems]:
    """A GPT-2's sizes are those of its tensors, because files from other tools lack a config.json.

    The number of heads comes from the file's header, else from config.json, else it is width / 64.
    """
    settings = files.settings
    problems = uncomputed(settings, GPT2_COMPUTED)
    shapes = {name.removeprefix(PREFIX): shape for name, shape in files.shapes.items()}
    try:
        (vocab_size, width), (context, _) = shapes["wte.weight"], shapes["wpe.weight"]
    except (KeyError, ValueError):
        problems.append("wte.weight [V, D] and wpe.weight [T, D] expected")
        raise ValueError(f"not a GPT-2: {'; '.join(problems)}") from None
    sizes: Fields = {"vocab_size": vocab_size, "context": context, "width": width}
    sizes["layers"] = len({name.split(".")[1] for name in shapes if re.match(r"h\.\d+\.", name)})
    heads = settings.get(GPT2_SIZES["heads"], max(1, width // HEAD_SIZE))
    heads = files.header.get("heads", heads)
    sizes["heads"] = int(heads) if re.fullmatch(r"[0-9]{1,9}", str(heads)) else 0
    if not sizes["heads"] or width % sizes["heads"]:
        problems.append(f"{str(heads)[:20]} heads do not divide a width of {width}")
        sizes["heads"] = 1
    problems += [
        f"{theirs} in {CONFIG} is {quoted(settings[theirs])}, in {WEIGHTS} {sizes[ours]}"
        for ours, theirs in GPT2_SIZES.items()
        if ours != "heads" and settings.get(theirs, sizes[ours]) != sizes[ours]
    ]
    return sizes, problems


def write_gpt2(shape: ModelShape) -> dict[str, Any]:
    return {
        **{name: values[0] for name, values in GPT2_COMPUTED.items()},
        **{theirs: getattr(shape, ours) for ours, theirs in GPT2_SIZES.items()},
        "tie_word_embeddings": True,
        # transformers would train with its default of 0.1
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }

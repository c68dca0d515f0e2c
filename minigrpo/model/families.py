"""Model families, by what their blocks compute and how their files describe it: families.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

# config.json's words for layers
FULL = "full_attention"
WINDOWED = "sliding_attention"
CONVOLUTION = "conv"
RECURRENT = "linear_attention"
OLD_WORDS = {"attention": FULL}


class Family(NamedTuple):
    """The properties that all models of a family share; the defaults are Llama's."""

    architecture: str  # class in transformers
    fields: Mapping[str, str]  # field of ModelShape -> its name in config.json
    names: Mapping[str, str]  # part of a parameter's name -> the part in files, if it differs
    missing: Mapping[str, Any]  # setting that config.json may leave out -> the value it then has
    # setting -> its values for which transformer.py computes the same; most settings may be missing
    supported: Mapping[str, Sequence[object]]
    # 1. What blocks compute.
    learns_positions: bool = False  # a position has an embedding
    norm: Literal["rms", "layer"] = "rms"
    norms: Literal["before", "after", "both"] = "before"  # place of the norms of mixer and MLP
    norms_add_one: bool = False  # files have the weights of norms minus 1
    has_fused_qkv: bool = False  # one layer computes queries, keys and values
    # RMS norms of queries and keys before the rotation, of each head or of the whole width
    qk_norm: Literal["none", "head", "width"] = "none"
    # the layers that have a bias in every model of the family; config.json may add others
    biases: Literal["none", "qkv", "all"] = "none"
    activation: Literal["silu", "gelu"] = "silu"  # in the MLP, of its gate if it has one
    gate: Literal["own", "fused", "none"] = "own"  # fused: one layer with what it multiplies
    # a gate of what queries find: beside each query, or a number per head from a layer of its own
    attention_gate: Literal["none", "query", "head"] = "none"
    scales_embeddings: bool = False  # embeddings are multiplied by the square root of the width
    # 2. What else files say, and how.
    layers: str = "num_hidden_layers"  # setting with their number
    layer_types: Sequence[str] = ()  # words for layers that are read; none: all are alike
    has_window: bool = False  # layers may have a window: all of them, or those of WINDOWED
    prefix: str = ""  # prefix of names in files, except for the head; it may be missing
    transposes: bool = False  # files have the weights of linear layers in blocks as [in, out]
    ropes_by_type: bool = False  # rotary positions are written by the type of layers
    written: Mapping[str, object] = {}  # further settings that an export has


def read_families(file: Path) -> dict[str, Family]:
    """The rows of the table, by the model_type in config.json."""
    rows = tomllib.loads(file.read_text("utf-8"))
    every = rows.pop("every")
    for row in rows.values():
        for name, table in every.items():
            of_row = {**table, **row.get(name, {})}
            row[name] = {key: value for key, value in of_row.items() if value != ""}
    return TypeAdapter(dict[str, Family]).validate_python(rows)


FAMILIES = read_families(Path(__file__).with_name("families.toml"))

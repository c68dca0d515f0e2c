"""config.json of a published model, read as a ModelShape and written from one.

A model is refused if transformer.py would compute another function than the one that was trained.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from ..errors import refusing
from ..hub import CONFIG
from .families import CONVOLUTION, FAMILIES, FULL, OLD_WORDS, RECURRENT, WINDOWED, Family
from .shape import GatedDeltaShape, ModelShape, Rope, ShortConvShape

SHAPES = TypeAdapter(ModelShape)  # refuses values that no model has, and ignores other names
LOCAL_THETA = "rope_local_base_freq"  # of layers with a window
ORIGINAL = "original_max_position_embeddings"
# setting with the distance between full layers -> what the others are
INTERVALS = {"sliding_window_pattern": WINDOWED, "full_attention_interval": RECURRENT}
# field of GatedDeltaShape -> setting
GATED_DELTA = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


@refusing(CONFIG)
def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a config.json describes. Raises ConfigError."""
    # 1. The settings. Of a model that also reads images, the text has its own.
    config = {**config, **config.get("text_config", {})}
    name = config["model_type"]
    if name not in FAMILIES:
        raise ValueError(f"model_type is {name!r}, not {' or '.join(FAMILIES)}")
    family = FAMILIES[name]
    stated = {setting: value for setting, value in config.items() if value is not None}
    config = {**family.missing, **stated}
    for setting, values in {"quantization_config": [], **family.supported}.items():
        if setting in stated and stated[setting] not in values:
            raise ValueError(f"{setting} is {config[setting]!r}, not one of {[*values]}")

    # 2. The shape.
    fields = {ours: config.get(theirs, 0) for ours, theirs in family.fields.items()}
    fields["mlp_width"] = config.get("block_ff_dim", fields["mlp_width"])
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * fields["mlp_width"] / 3))
        fields["mlp_width"] = -(-width // multiple) * multiple
    layers = read_layers(config, family)
    for layer in layers:
        scaling = (layer.get("rope") or {}).get("scaling") or {}
        if scaling.keys() & {"short_factor", "llama_4_scaling_beta"}:
            # what is beyond the original context is computed otherwise
            fields["context"] = min(fields["context"], scaling[ORIGINAL])
    return SHAPES.validate_python({**fields, "family": name, "layers": layers})


def read_layers(config: Mapping[str, Any], family: Family) -> list[dict[str, Any]]:
    number = config[family.layers]
    rotates = config.get("no_rope_layers", [1] * number)
    layers: list[dict[str, Any]] = []
    for layer, word in enumerate(layer_types(config, family, number)):
        if word == CONVOLUTION:
            layers.append({"mixer": "short_conv", "taps": config["conv_L_cache"]})
        elif word == RECURRENT:
            fields = {ours: config[theirs] for ours, theirs in GATED_DELTA.items()}
            layers.append({"mixer": "gated_delta", **fields})
        else:
            window = config.get("sliding_window", 0) if word == WINDOWED else 0
            has_rope = rotates[layer] and not family.learns_positions
            rope = read_rope(config, word) if has_rope else None
            layers.append({"mixer": "attention", "window": window, "rope": rope})
    return layers


def layer_types(config: Mapping[str, Any], family: Family, number: int) -> list[str]:
    """The word for each layer; older files have numbers instead."""
    if family.layer_types and "layer_types" in config:
        words = [OLD_WORDS.get(word, word) for word in config["layer_types"]]
        unknown = {*words} - {*family.layer_types}
        if unknown or len(words) != number:
            raise ValueError(f"layer_types: {number} of {[*family.layer_types]} are supported")
        return words
    if "full_attn_idxs" in config:
        attending = config["full_attn_idxs"]
        return [FULL if layer in attending else CONVOLUTION for layer in range(number)]
    for setting, other in INTERVALS.items():
        if setting in config:
            every = config[setting]
            return [other if (layer + 1) % every else FULL for layer in range(number)]
    has_windows = family.has_window and "sliding_window" in config
    return [WINDOWED if has_windows else FULL] * number


def read_rope(config: Mapping[str, Any], word: str) -> dict[str, Any]:
    """The rotary positions of layers of a type, as fields of a Rope.

    Version 4 of transformers has fields, 5 `rope_parameters`, for some families one for each type.
    """
    # 1. The settings of this type. Those of full layers alone are scaled in version 4.
    settings: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if settings.keys() & {FULL, WINDOWED}:
        settings = settings.get(word) or {}
    elif word == WINDOWED and FULL in config.get("layer_types", ()):
        settings = {}
    own = {**config, **settings}
    if word == WINDOWED and LOCAL_THETA in config:
        own["rope_theta"] = settings.get("rope_theta", config[LOCAL_THETA])
    rope_type = own.get("rope_type", own.get("type", "default"))
    fields = {
        "theta": own["rope_theta"],
        "fraction": own.get("partial_rotary_factor", 1.0),
        "is_proportional": rope_type == "proportional",
    }
    if rope_type in ("default", "proportional"):
        return fields

    # 2. The scaling. What it multiplies rotated heads by may be left out.
    context = own["max_position_embeddings"]
    original: int = own.setdefault(ORIGINAL, context)
    logarithm = math.log(max(own.setdefault("factor", context / original), 1.0))
    if own.get("attention_factor") is None and rope_type == "longrope":
        own["attention_factor"] = math.sqrt(1 + logarithm / math.log(original))
    elif own.get("attention_factor") is None:
        of_all = own.get("mscale_all_dim") or 0.0
        of_rotated = own["mscale"] if of_all else 1.0
        tenth = 0.1 * logarithm
        own["attention_factor"] = (1 + tenth * of_rotated) / (1 + tenth * of_all)
    return {**fields, "scaling": {**own, "rope_type": rope_type}}


def write_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json, in words that versions 4 and 5 of transformers read."""
    family = shape.family_row
    return {
        "architectures": [family.architecture],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in family.fields.items()},
        **write_layers(shape),
        **{theirs: next(iter(values), None) for theirs, values in family.supported.items()},
        # some families have defaults beyond the vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **family.written,
    }


def rope_settings(rope: Rope) -> dict[str, Any]:
    """The settings of a Rope in version 5."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if rope.scaling:
        scaling = asdict(rope.scaling)
    if rope.is_proportional:
        scaling["rope_type"] = "proportional"
    if rope.fraction != 1:
        scaling["partial_rotary_factor"] = rope.fraction
    if "short_factor" in scaling:
        scaling["long_factor"] = scaling["short_factor"]  # no context is so long that it is used
    return {"rope_theta": rope.theta, **scaling}


def write_layers(shape: ModelShape) -> dict[str, Any]:
    family = shape.family_row
    written: dict[str, Any] = {family.layers: len(shape.layers)}
    if family.learns_positions:
        return written
    # 1. The layers that do not attend.
    words = []
    for layer in shape.layers:
        if isinstance(layer, ShortConvShape):
            words.append(CONVOLUTION)
            written["conv_L_cache"] = layer.taps
        elif isinstance(layer, GatedDeltaShape):
            words.append(RECURRENT)
            written |= {theirs: getattr(layer, ours) for ours, theirs in GATED_DELTA.items()}
        else:
            words.append(WINDOWED if layer.window else FULL)
    if family.layer_types:
        written["layer_types"] = words

    # 2. The layers that attend.
    attending = shape.attention_layers.values()
    ropes = {layer.window > 0: layer.rope for layer in attending if layer.rope}
    rope = ropes.get(False) or ropes[True]
    if family.ropes_by_type:
        written["rope_parameters"] = {
            WINDOWED if has_window else FULL: rope_settings(rope)
            for has_window, rope in ropes.items()
        }
    else:
        settings = rope_settings(rope)
        written["rope_theta"] = settings.pop("rope_theta")
        written["partial_rotary_factor"] = settings.pop("partial_rotary_factor", 1.0)
        written["rope_scaling"] = settings if rope.scaling else None
    written["sliding_window"] = max(layer.window for layer in attending) or None
    if LOCAL_THETA in family.missing and True in ropes:
        written[LOCAL_THETA] = ropes[True].theta
    if None in {layer.rope for layer in attending}:
        written["no_rope_layers"] = [int(layer.rope is not None) for layer in attending]
    return written

"""config.json of a published model, read as a ModelShape and written from one.

A model is refused if transformer.py would compute another function than the one that was trained.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from ..errors import refusing
from ..hub import CONFIG
from .families import CONVOLUTION, FAMILIES, FULL, OLD_WORDS, RECURRENT, WINDOWED, Family
from .shape import GatedDeltaShape, ModelShape, ShortConvShape

SHAPES = TypeAdapter(ModelShape)  # refuses values that no model has, and ignores other names
LOCAL_THETA = "rope_local_base_freq"  # of layers with a window
# old name of a setting -> its name
OLD_NAMES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
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
    stated = {OLD_NAMES.get(name, name): x for name, x in config.items() if x is not None}
    config = {**family.missing, **stated}
    for setting, values in {"quantization_config": [None], **family.supported}.items():
        if setting in config and config[setting] not in values:
            raise ValueError(f"{setting} is {config[setting]!r}, not one of {[*values]}")

    # 2. The shape.
    fields = {ours: config.get(theirs, 0) for ours, theirs in family.fields.items()}
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * fields["mlp_width"] / 3))
        fields["mlp_width"] = -(-width // multiple) * multiple
    layers = read_layers(config, family)
    return SHAPES.validate_python({**fields, "family": name, "layers": layers})


def read_layers(config: Mapping[str, Any], family: Family) -> list[dict[str, Any]]:
    """The fields of each layer's shape."""
    number = config[family.layers]
    every = config.get("no_rope_layer_interval", number + 1)
    by_number = [(layer + 1) % every for layer in range(number)]
    rotates = config.get("no_rope_layers", by_number)
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
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    settings = settings.get(word, settings)
    theta = settings.get("rope_theta", config["rope_theta"])
    if word == WINDOWED:
        theta = settings.get("rope_theta", config.get(LOCAL_THETA, theta))
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type is {rope_type!r}, not default or llama3")
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    scaling = settings if rope_type == "llama3" else None
    return {"theta": theta, "fraction": fraction, "scaling": scaling}


def write_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json, in words that versions 4 and 5 of transformers read."""
    family = shape.family_row
    return {
        "architectures": [family.architecture],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in family.fields.items()},
        **write_layers(shape),
        **{theirs: values[0] for theirs, values in family.supported.items()},
        # some families have defaults beyond the vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **family.written,
    }


def write_layers(shape: ModelShape) -> dict[str, Any]:
    """The settings of config.json that `read_layers` reads."""
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
    written["rope_theta"] = rope.theta
    written["rope_scaling"] = rope.scaling and {"rope_type": "llama3", **asdict(rope.scaling)}
    if rope.fraction != 1:
        written["partial_rotary_factor"] = rope.fraction
    written["sliding_window"] = max(layer.window for layer in attending) or None
    if LOCAL_THETA in family.missing and True in ropes:
        written[LOCAL_THETA] = ropes[True].theta
    if "no_rope_layer_interval" in family.missing:
        written["no_rope_layers"] = [int(layer.rope is not None) for layer in attending]
    return written

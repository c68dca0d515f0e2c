"""config.json of Llama and its relatives: how it becomes a `ModelShape`, and how it is written."""

import math
from collections.abc import Mapping
from typing import Any

from ..runtime.text import quoted
from .shape import ModelShape, RopeScaling
from .weight_files import CONFIG, Fields, Problems, Settings, WeightFiles, uncomputed

LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "kv_heads": "num_key_value_heads",  # this and the next may be missing
    "head_dim": "head_dim",
}
LLAMA_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "use_sliding_window": (False, None),
}
ROPE_SCALING = {  # the fields of RopeScaling -> their names in config.json
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def read_llama(
    files: WeightFiles,
    *,
    theta: float = 10000.0,
    tied: bool = False,
    qkv_bias: bool | None = None,
    head_norm: bool = False,
) -> tuple[Fields, Problems]:
    """The shape of a Llama or a relative.

    Args:
        theta, tied: what holds if config.json does not say.
        qkv_bias: of a family whose config.json has no field for it; None: `attention_bias`.
    """
    settings = files.settings
    problems = uncomputed(settings, LLAMA_COMPUTED)
    others = {str(kind) for kind in settings.get("layer_types") or ()} - {"full_attention"}
    if others:
        problems.append(f"layer_types in {CONFIG} has {quoted(min(others))}, not full_attention")
    optional = ("kv_heads", "head_dim")
    sizes = {ours: settings.get(theirs) or 0 for ours, theirs in LLAMA_SIZES.items()}
    wrong = [
        f"{LLAMA_SIZES[name]} in {CONFIG} is {quoted(settings.get(LLAMA_SIZES[name]))}"
        for name, size in sizes.items()
        if type(size) is not int or size < 0 or not (size or name in optional)
    ]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}, not a size")
    scaling, base = _rope(settings, theta, problems)
    biased = bool(settings.get("attention_bias", False))
    fields = {
        **sizes,
        "norm": "rms",
        "norm_eps": float(_number(settings, "rms_norm_eps") or 1e-6),
        "projections": "separate",
        "mlp": "swiglu",
        "qkv_bias": biased if qkv_bias is None else qkv_bias,
        "out_bias": biased if qkv_bias is None else False,
        "mlp_bias": bool(settings.get("mlp_bias", False)),
        "head_norm": head_norm,
        "rope_theta": base,
        "rope_scaling": scaling,
        "tied": bool(settings.get("tie_word_embeddings", tied)),
    }
    return fields, problems


def read_smollm3(files: WeightFiles) -> tuple[Fields, Problems]:
    """A Llama in which every fourth layer does not rotate."""
    fields, problems = read_llama(files, theta=2e6, tied=True)
    every = files.settings.get("no_rope_layer_interval", 4)
    rotates = files.settings.get("no_rope_layers") or [
        (layer + 1) % every != 0 for layer in range(fields["layers"])
    ]
    fields["unrotated"] = tuple(layer for layer, rotated in enumerate(rotates) if not rotated)
    return fields, problems


def _rope(settings: Settings, theta: float, problems: Problems) -> tuple[RopeScaling | None, float]:
    """Rotary scaling and base, from the fields of transformers 5, else from those of version 4."""
    new, old = (settings.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    found = new or old
    if new and old and _scaling(new) != _scaling(old):
        problems.append(f"rope_parameters and rope_scaling in {CONFIG} differ; keep one of them")
    kind = found.get("rope_type", found.get("type", "default"))
    inner, outer = (_number(source, "rope_theta") for source in (found, settings))
    base = float(inner or outer or theta)
    if inner and outer and inner != outer:  # versions of transformers differ in which one counts
        problems.append(f"rope_theta in {CONFIG} is both {inner!r} and {outer!r}; keep one of them")
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor in {CONFIG} is {found['partial_rotary_factor']!r}")
    if different := [name for name, x in found.items() if isinstance(x, Mapping)]:
        problems.append(f"rotary positions of {quoted(different[0])} layers differ from others")
    if kind == "default":
        return None, base
    if kind != "llama3":
        problems.append(f"rope type {quoted(kind)}: only default and llama3 are supported")
        return None, base
    scaling = {ours: _number(found, theirs) for ours, theirs in ROPE_SCALING.items()}
    if missing := [ROPE_SCALING[ours] for ours, x in scaling.items() if x is None]:
        problems.append(f"rope type llama3 without {missing[0]}")
        return None, base
    return RopeScaling(**scaling), base


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What both versions' fields say about scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"kind": kind, **{name: rope.get(name) for name in ROPE_SCALING.values()}}


def _number(settings: Settings, name: str) -> Any:
    """A positive number of config.json, or None. Raises ValueError if it is something else."""
    value = settings.get(name)
    if value is None or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    raise ValueError(f"{name} in {CONFIG} is {quoted(value)}, not a positive number")


def write_llama(shape: ModelShape) -> dict[str, Any]:
    """config.json in the words of transformers 5, and in those of version 4."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling:
        values = vars(shape.rope_scaling)
        rope = {"rope_type": "llama3", **{ROPE_SCALING[name]: x for name, x in values.items()}}
    return {
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in LLAMA_SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias and shape.family != "qwen2",
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_scaling else None,
        "tie_word_embeddings": shape.tied,
    }


def write_smollm3(shape: ModelShape) -> dict[str, Any]:
    rotates = [int(layer not in shape.unrotated) for layer in range(shape.layers)]
    return {**write_llama(shape), "no_rope_layers": rotates}

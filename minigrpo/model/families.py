"""The families of open models: how their config.json reads, and how their parameters are named.

A family is a row of FAMILIES. A model is rejected if transformer.py would compute another function
than the one that was trained: loading it anyway would give a model that runs but writes nonsense.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime.text import quoted
from .shape import ModelShape, RopeScaling
from .weight_files import CONFIG, WEIGHTS, WeightFiles

Settings = Mapping[str, Any]
Fields = dict[str, Any]  # of ModelShape
Problems = list[str]
SHAPE = "shape"  # key of a file's header: the fields of ModelShape as JSON
HEAD_SIZE = 64  # of every published GPT-2

# --- GPT-2 ----------------------------------------------------------------------------------------

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
    problems = _uncomputed(settings, GPT2_COMPUTED)
    shapes = {FAMILIES["gpt2"].ours(name): shape for name, shape in files.shapes.items()}
    try:
        (vocab_size, width), (context, _) = shapes["wte.weight"], shapes["wpe.weight"]
    except (KeyError, ValueError):
        problems.append("wte.weight [V, D] and wpe.weight [T, D] expected")
        raise ValueError(f"{files.path}: not a GPT-2: {'; '.join(problems)}") from None
    sizes: Fields = {"vocab_size": vocab_size, "context": context, "width": width}
    sizes["layers"] = len({name.split(".")[1] for name in shapes if re.match(r"h\.\d+\.", name)})
    heads = settings.get(GPT2_SIZES["heads"], max(1, width // HEAD_SIZE))
    heads = files.header.get("heads", heads)
    sizes["heads"] = int(heads) if str(heads).isdecimal() else 0
    if not sizes["heads"] or width % sizes["heads"]:
        problems.append(f"{heads} heads do not divide a width of {width}")
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


# --- Llama and its relatives ----------------------------------------------------------------------

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
    "quantization_config": (None,),
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
    problems = _uncomputed(settings, LLAMA_COMPUTED)
    if any(kind != "full_attention" for kind in settings.get("layer_types") or ()):
        problems.append(f"layer_types in {CONFIG} has other layers than full_attention")
    optional = ("kv_heads", "head_dim")
    sizes = {ours: settings.get(theirs) or 0 for ours, theirs in LLAMA_SIZES.items()}
    wrong = [
        f"{LLAMA_SIZES[name]} in {CONFIG} is {quoted(settings.get(LLAMA_SIZES[name]))}"
        for name, size in sizes.items()
        if type(size) is not int or size < 0 or not (size or name in optional)
    ]
    if wrong:
        raise ValueError(f"{files.path}: {'; '.join(wrong)}, not a size")
    scaling, base = _rope(settings, theta, problems)
    biased = bool(settings.get("attention_bias", False))
    fields = {
        **sizes,
        "norm": "rms",
        "norm_eps": float(settings.get("rms_norm_eps", 1e-6)),
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
    found = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    base = float(found.get("rope_theta") or settings.get("rope_theta") or theta)
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor in {CONFIG} is {found['partial_rotary_factor']!r}")
    if kind == "default":
        return None, base
    if kind != "llama3":
        problems.append(f"rope type {kind!r}: only default and llama3 are supported")
        return None, base
    try:
        return RopeScaling(**{ours: found[theirs] for ours, theirs in ROPE_SCALING.items()}), base
    except KeyError as error:
        problems.append(f"rope type llama3 without {error.args[0]}")
        return None, base


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


# --- the table ------------------------------------------------------------------------------------

LLAMA_NAMES = (  # a part of a name here -> in files
    ("wte.", "model.embed_tokens."),
    ("h.", "model.layers."),
    (".attn.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    ("ln_f.", "model.norm."),
    ("head.", "lm_head."),
)


@dataclass(frozen=True)
class Family:
    """A kind of model: its files' names and settings."""

    architecture: str  # the class in transformers
    read: Callable[[WeightFiles], tuple[Fields, Problems]]
    write: Callable[[ModelShape], dict[str, Any]]  # config.json for an export
    names: tuple[tuple[str, str], ...] = LLAMA_NAMES
    prefix: str = ""  # that stored names may have
    transposed: tuple[str, ...] = ()  # ends of names whose weights are stored as [in, out]
    buffers: str = r".*\.rotary_emb\.inv_freq"  # stored by older versions, and not needed

    def theirs(self, name: str) -> str:
        """The stored name of a parameter."""
        for ours, theirs in self.names:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
            elif ours.startswith("."):
                name = name.replace(ours, theirs)
        return name

    def ours(self, name: str) -> str:
        """The name here of a stored parameter."""
        name = name.removeprefix(self.prefix)
        for ours, theirs in self.names:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
            elif ours.startswith("."):
                name = name.replace(theirs, ours)
        return name


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        read_gpt2,
        write_gpt2,
        names=(("head.", "lm_head."),),
        prefix="transformer.",
        transposed=("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight"),
        buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "llama": Family("LlamaForCausalLM", read_llama, write_llama),
    "qwen2": Family(
        "Qwen2ForCausalLM", lambda files: read_llama(files, qkv_bias=True), write_llama
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", lambda files: read_llama(files, head_norm=True), write_llama
    ),
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3, write_smollm3),
}
UNSUPPORTED = {  # a part of model_type -> why
    "moe": "a mixture of experts",
    "mixtral": "a mixture of experts",
    "llama4": "a mixture of experts",
    "gemma": "other norms, sliding windows and two rotary bases",
    "qwen3_5": "linear attention, whose state cannot follow a tree of completions",
    "qwen3_next": "linear attention, whose state cannot follow a tree of completions",
}


def read_shape(files: WeightFiles) -> tuple[ModelShape, Problems]:
    """The shape of a model, and what does not fit.

    Raises ValueError, in one line with the path, if there is no shape to speak of.
    """
    if SHAPE in files.header:  # a file of our own
        return ModelShape(**json.loads(files.header[SHAPE])), []
    name = str(files.settings.get("model_type", "gpt2"))
    if name not in FAMILIES:
        why = next((f" ({why})" for part, why in UNSUPPORTED.items() if part in name), "")
        allowed = ", ".join(FAMILIES)
        raise ValueError(
            f"{files.path}: model_type in {CONFIG} is {name!r}{why}; supported are {allowed}"
        )
    fields, problems = FAMILIES[name].read(files)
    try:
        return ModelShape(**fields, family=name), problems
    except ValueError as error:
        raise ValueError(f"{files.path}: {error}") from None


def _uncomputed(settings: Settings, computed: Mapping[str, tuple[Any, ...]]) -> Problems:
    return [
        f"{name} in {CONFIG} is {quoted(settings[name])}, not {values[0]!r}"
        for name, values in computed.items()
        if settings.get(name, values[0]) not in values
    ]

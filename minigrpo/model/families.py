"""A table of model families: what their blocks compute, and how their files describe it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

# field of ModelShape -> its name in config.json
FIELDS = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
# part of a parameter's name here -> the part in files, if it differs
NAMES = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "ln_2": "post_attention_layernorm",
    "ln_f": "model.norm",
    "head": "lm_head",
}
NAMES_AFTER = {"ln_1_after": "post_attention_layernorm", "ln_2_after": "post_feedforward_layernorm"}
# config.json's words for layers without and with a window
FULL = "full_attention"
WINDOWED = "sliding_attention"
OLD_WORDS = {"attention": FULL}
# setting that config.json may leave out -> the value that it then has
MISSING = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
# setting -> its values for which transformer.py computes the same; most settings may be missing
SUPPORTED: Mapping[str, Sequence[object]] = {"hidden_act": ["silu"], "use_sliding_window": [False]}


class Family(NamedTuple):
    """The properties that all models of a family share; the defaults are Llama's."""

    architecture: str  # class in transformers
    is_gpt2: bool = False  # LayerNorm, learned positions, one projection, an MLP without a gate
    qkv_bias: bool = False  # only the projections of queries, keys and values have a bias
    # RMS norms of queries and keys before the rotation, of each head or of the whole width
    qk_norm: Literal["none", "head", "width"] = "none"
    norms: Literal["before", "after", "both"] = "before"  # place of the norms of attention and MLP
    norms_add_one: bool = False  # files have the weights of norms minus 1
    gate: Literal["silu", "gelu"] = "silu"  # activation of the MLP's gate
    has_fused_gate: bool = False  # one layer computes the gate and what it multiplies
    scales_embeddings: bool = False  # embeddings are multiplied by the square root of the width
    unrotated: int = 0  # distance between layers without positions; 0 means none
    fields: Mapping[str, str] = FIELDS
    names: Mapping[str, str] = NAMES
    prefix: str = ""  # prefix of names in files, except for the head; it may be missing
    missing: Mapping[str, Any] = MISSING
    supported: Mapping[str, Sequence[object]] = SUPPORTED
    names_layers: bool = False  # config.json says which layers have a window


# model_type in config.json -> row
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        is_gpt2=True,
        fields={
            "vocab_size": "vocab_size",
            "context": "n_positions",
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "mlp_width": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings",
        },
        names={"head": "lm_head"},
        prefix="transformer.",
        missing={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        supported={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
        },
    ),
    "llama": Family("LlamaForCausalLM", fields=FIELDS | BIASES),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        qk_norm="head",
        norms="after",
        names=NAMES | NAMES_AFTER,
        missing={**MISSING, "rms_norm_eps": 1e-5},
        supported={**SUPPORTED, "sliding_window": [None]},
        names_layers=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm="head",
        norms="both",
        norms_add_one=True,
        gate="gelu",
        scales_embeddings=True,
        fields={
            **FIELDS,
            "window": "sliding_window",
            "full_every": "sliding_window_pattern",
            "local_rope_theta": "rope_local_base_freq",
            "attention_size": "query_pre_attn_scalar",
        },
        names={**NAMES, **NAMES_AFTER, "ln_2": "pre_feedforward_layernorm"},
        missing={
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        supported={
            "hidden_activation": ["gelu_pytorch_tanh"],
            "attention_bias": [False],
            "attn_logit_softcapping": [None],
            "final_logit_softcapping": [None],
            "use_bidirectional_attention": (False, None),
        },
        names_layers=True,
    ),
    "granite": Family("GraniteForCausalLM", fields=FIELDS | BIASES | MULTIPLIERS),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        has_fused_gate=True,
        fields={**FIELDS, **ATTENTION_BIAS, **MULTIPLIERS, "mlp_width": "shared_intermediate_size"},
        names={
            **NAMES,
            "mlp": "shared_mlp",
            "gate_up_proj": "input_linear",
            "down_proj": "output_linear",
        },
        supported={**SUPPORTED, "num_local_experts": [0], "position_embedding_type": ["rope"]},
        names_layers=True,
    ),
    "mistral": Family("MistralForCausalLM", fields=FIELDS | {"window": "sliding_window"}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="width",
        norms="after",
        fields=FIELDS | ATTENTION_BIAS,
        names=NAMES | NAMES_AFTER,
        missing={**MISSING, "rms_norm_eps": 1e-5},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fields=FIELDS | ATTENTION_BIAS),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        unrotated=4,
        fields=FIELDS | BIASES,
        missing={**MISSING, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}

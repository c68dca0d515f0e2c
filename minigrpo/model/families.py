"""A table of model families: what their blocks compute, and how their files describe it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

# field of ModelShape -> its name in config.json
FIELDS = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
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
LFM_NAMES = NAMES | {
    "ln_1": "operator_norm",
    "ln_2": "ffn_norm",
    "ln_f": "model.embedding_norm",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
# config.json's words for layers
FULL = "full_attention"
WINDOWED = "sliding_attention"
CONVOLUTION = "conv"
RECURRENT = "linear_attention"
OLD_WORDS = {"attention": FULL}
# setting that config.json may leave out -> the value that it then has
MISSING = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
# setting -> its values for which transformer.py computes the same; most settings may be missing
SUPPORTED: Mapping[str, Sequence[object]] = {"hidden_act": ["silu"], "use_sliding_window": [False]}


class Family(NamedTuple):
    """The properties that all models of a family share; the defaults are Llama's."""

    architecture: str  # class in transformers
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
    # 2. What files say, and how.
    fields: Mapping[str, str] = FIELDS
    layers: str = "num_hidden_layers"  # setting with their number
    layer_types: Sequence[str] = ()  # words for layers that are read; none: all are alike
    has_window: bool = False  # layers may have a window: all of them, or those of WINDOWED
    names: Mapping[str, str] = NAMES
    prefix: str = ""  # prefix of names in files, except for the head; it may be missing
    transposes: bool = False  # files have the weights of linear layers in blocks as [in, out]
    missing: Mapping[str, Any] = MISSING
    supported: Mapping[str, Sequence[object]] = SUPPORTED
    ropes_by_type: bool = False  # rotary positions are written by the type of layers
    written: Mapping[str, object] = {}  # further settings that an export has


# model_type in config.json -> row
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        learns_positions=True,
        norm="layer",
        has_fused_qkv=True,
        biases="all",
        activation="gelu",
        gate="none",
        fields={
            "vocab_size": "vocab_size",
            "context": "n_positions",
            "width": "n_embd",
            "heads": "n_head",
            "mlp_width": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings",
        },
        layers="n_layer",
        names={
            "head": "lm_head",
            "qkv_proj": "c_attn",
            "o_proj": "c_proj",
            "up_proj": "c_fc",
            "down_proj": "c_proj",
        },
        prefix="transformer.",
        transposes=True,
        missing={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        supported={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
        },
        # transformers would train with its default of 0.1
        written=dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "llama": Family("LlamaForCausalLM", fields=FIELDS | BIASES),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        qk_norm="head",
        norms="after",
        names=NAMES | NAMES_AFTER,
        layer_types=[FULL],
        missing={**MISSING, "rms_norm_eps": 1e-5},
        supported={**SUPPORTED, "sliding_window": [None]},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm="head",
        norms="both",
        norms_add_one=True,
        activation="gelu",
        scales_embeddings=True,
        fields=FIELDS | {"attention_size": "query_pre_attn_scalar"},
        layer_types=[FULL, WINDOWED],
        has_window=True,
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
            "use_bidirectional_attention": [False],
        },
    ),
    "granite": Family("GraniteForCausalLM", fields=FIELDS | BIASES | MULTIPLIERS),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        gate="fused",
        fields={**FIELDS, **ATTENTION_BIAS, **MULTIPLIERS, "mlp_width": "shared_intermediate_size"},
        names={
            **NAMES,
            "mlp": "shared_mlp",
            "gate_up_proj": "input_linear",
            "down_proj": "output_linear",
        },
        layer_types=[FULL],
        supported={**SUPPORTED, "num_local_experts": [0], "position_embedding_type": ["rope"]},
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        qk_norm="head",
        fields={**FIELDS, "norm_eps": "norm_eps"},
        layer_types=[FULL, CONVOLUTION],
        names={
            **LFM_NAMES,
            "o_proj": "out_proj",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
        },
        missing={
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        supported={"conv_bias": [False]},
        written={"block_auto_adjust_ff_dim": False},  # the width is that of the weights
    ),
    "lfm3": Family(
        "Lfm3ForCausalLM",
        qk_norm="head",
        norms="both",
        attention_gate="head",
        fields={**FIELDS, **ATTENTION_BIAS, "norm_eps": "norm_eps"},
        layer_types=[FULL, WINDOWED, CONVOLUTION],
        names={**LFM_NAMES, "ln_1_after": "post_operator_norm", "ln_2_after": "post_ffn_norm"},
        missing={"norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 7},
        supported={
            "conv_bias": [False],
            "use_sandwich_norm": [True],
            "use_attention_gate": [True],
        },
        ropes_by_type=True,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        missing={**MISSING, "rms_norm_eps": 1e-5},
        supported={**SUPPORTED, "sliding_window": [None]},
    ),
    "mistral": Family("MistralForCausalLM", has_window=True),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="width",
        norms="after",
        fields=FIELDS | ATTENTION_BIAS,
        names=NAMES | NAMES_AFTER,
        missing={**MISSING, "rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        qk_norm="width",
        norms="after",
        fields=FIELDS | ATTENTION_BIAS,
        layer_types=[FULL, WINDOWED],
        has_window=True,
        names=NAMES | NAMES_AFTER,
        missing={**MISSING, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window_pattern": 4},
        ropes_by_type=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        has_fused_qkv=True,
        gate="fused",
        has_window=True,
        missing={**MISSING, "rms_norm_eps": 1e-5},
    ),
    "qwen2": Family("Qwen2ForCausalLM", biases="qkv"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fields=FIELDS | ATTENTION_BIAS),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qk_norm="head",
        norms_add_one=True,
        attention_gate="query",
        fields=FIELDS | ATTENTION_BIAS,
        layer_types=[FULL, RECURRENT],
        missing={**MISSING, "partial_rotary_factor": 0.25, "full_attention_interval": 4},
        supported={"hidden_act": ["silu"], "attn_output_gate": [True]},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        fields=FIELDS | BIASES,
        missing={**MISSING, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}

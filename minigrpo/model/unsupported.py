"""Models that are refused, and why: other families, and quantised weights.

Loading them anyway would give a model that runs but writes nonsense, or an error in the middle.
"""

from collections.abc import Mapping

from ..runtime.text import quoted
from .weight_files import CONFIG, Settings

EXPERTS = "a mixture of experts"
LINEAR = "linear attention, whose state cannot follow a tree of completions"
RECURRENT = "a recurrent state, which cannot follow a tree of completions"
GEMMA = "other norms and scales; from Gemma 2 on sliding windows, from Gemma 3 on two rotary bases"
OTHER_INPUT = "it reads more than text"
MODEL_TYPES = {  # a part of model_type -> why
    **dict.fromkeys(("moe", "mixtral", "llama4", "deepseek_v", "gpt_oss", "dbrx"), EXPERTS),
    **dict.fromkeys(("qwen3_5", "qwen3_next", "kimi_linear"), LINEAR),
    **dict.fromkeys(("mamba", "rwkv", "recurrent", "jamba", "lfm2"), RECURRENT),
    "gemma": GEMMA,
    **dict.fromkeys(("_vl", "_omni", "_audio", "mllama", "llava"), OTHER_INPUT),
}
FIELDS = {  # a field that is set in config.json -> why, for types that are not listed
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("linear_num_key_heads", "linear_conv_kernel_dim"), LINEAR),
    **dict.fromkeys(("vision_config", "audio_config"), OTHER_INPUT),
    "is_encoder_decoder": "it has an encoder",
}
# Ends of the names of tensors that GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8 and MXFP4 add.
QUANTISED_NAMES = (
    *(".qweight", ".qzeros", ".g_idx", ".absmax", ".quant_map", ".SCB"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks", "_scales"),
)
QUANTISED_TYPES = ("F8_", "F6_", "F4")  # beginnings of what safetensors calls such types


def why_not_family(name: str, settings: Settings) -> str:
    """Why a model_type is not supported, in brackets, or "" if that is not known."""
    parts = (why for part, why in MODEL_TYPES.items() if part in name)
    fields = (why for field, why in FIELDS.items() if settings.get(field))
    return next((f" ({why})" for why in (*parts, *fields)), "")


def check_quantised(settings: Settings, dtypes: Mapping[str, str]) -> None:
    """Raise ValueError for a quantised model.

    Args:
        settings: config.json.
        dtypes: stored name -> type of each tensor, as safetensors names it.
    """
    found = settings.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    signs = [f"quantization_config in {CONFIG} is {quoted(method or found)}"] if found else []
    signs += [
        f"{name} is {kind}"
        for name, kind in dtypes.items()
        if name.endswith(QUANTISED_NAMES) or kind.startswith(QUANTISED_TYPES)
    ]
    if signs:
        raise ValueError(
            f"is quantised ({signs[0]}); take the float32, bfloat16 or float16 weights that it was "
            "made from"
        )

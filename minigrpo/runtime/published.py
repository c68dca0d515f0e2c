"""Shapes of published models, so that `minigrpo plan` needs no download.

Only the plan reads this table; a run reads config.json. What no tensor depends on is left out, such
as the scaling of rotary frequencies.
"""

from typing import Any

from ..model.architectures import ARCHITECTURES
from ..model.shape import ModelShape

LLAMA = {**ARCHITECTURES["llama"], "family": "llama"}
QWEN2 = {**ARCHITECTURES["llama"], "family": "qwen2", "qkv_bias": True}
QWEN3 = {**ARCHITECTURES["qwen3"], "family": "qwen3", "head_dim": 128}
# vocabulary and context of a series
OF_GPT2 = {**ARCHITECTURES["gpt2"], "family": "gpt2", "vocab_size": 50257, "context": 1024}
OF_SMOLLM2 = {**LLAMA, "vocab_size": 49152, "context": 8192}
OF_LLAMA = {**LLAMA, "vocab_size": 128256, "context": 131072}
OF_QWEN2 = {**QWEN2, "vocab_size": 151936, "context": 32768}
OF_QWEN3 = {**QWEN3, "vocab_size": 151936, "context": 40960}
# name -> its series, layers, width, heads, heads of keys and values, width of the MLP
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int, int, int]] = {
    "openai-community/gpt2": (OF_GPT2, 12, 768, 12, 12, 3072),
    "openai-community/gpt2-medium": (OF_GPT2, 24, 1024, 16, 16, 4096),
    "openai-community/gpt2-large": (OF_GPT2, 36, 1280, 20, 20, 5120),
    "openai-community/gpt2-xl": (OF_GPT2, 48, 1600, 25, 25, 6400),
    "HuggingFaceTB/SmolLM2-135M": (OF_SMOLLM2, 30, 576, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-360M": (OF_SMOLLM2, 32, 960, 15, 5, 2560),
    "HuggingFaceTB/SmolLM2-1.7B": (OF_SMOLLM2, 24, 2048, 32, 32, 8192),
    "meta-llama/Llama-3.2-1B": (OF_LLAMA, 16, 2048, 32, 8, 8192),
    "meta-llama/Llama-3.2-3B": (OF_LLAMA, 28, 3072, 24, 8, 8192),
    "Qwen/Qwen2.5-0.5B": (OF_QWEN2, 24, 896, 14, 2, 4864),
    "Qwen/Qwen2.5-1.5B": (OF_QWEN2, 28, 1536, 12, 2, 8960),
    "Qwen/Qwen2.5-3B": (OF_QWEN2, 36, 2048, 16, 2, 11008),
    "Qwen/Qwen2.5-7B": ({**OF_QWEN2, "vocab_size": 152064, "tied": False}, 28, 3584, 28, 4, 18944),
    "Qwen/Qwen3-0.6B": (OF_QWEN3, 28, 1024, 16, 8, 3072),
    "Qwen/Qwen3-1.7B": (OF_QWEN3, 28, 2048, 16, 8, 6144),
    "Qwen/Qwen3-4B": (OF_QWEN3, 36, 2560, 32, 8, 9728),
}
VARIANTS = ("-Instruct", "-Base")  # ends of names; their shape is the same


def published_shape(name: str) -> ModelShape | None:
    """The shape of ORG/NAME or ORG/NAME@REVISION, or None if it is not in the table."""
    name = name.partition("@")[0]
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    if name not in PUBLISHED:
        return None
    series, layers, width, heads, kv_heads, mlp_width = PUBLISHED[name]
    return ModelShape(
        **series, layers=layers, width=width, heads=heads, kv_heads=kv_heads, mlp_width=mlp_width
    )

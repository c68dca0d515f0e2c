"""A small random chat model: Qwen2's architecture, tokenizer and chat template in one folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.model.weights import export_model

from . import test_chat

SIZES: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 24}
QWEN2: dict[str, Any] = {
    "family": "qwen2",
    "norm": "rms",
    "projections": "separate",
    "mlp": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}


def write_model(folder: Path, context: int = 160) -> Path:
    """Write a model whose end of text, `<|endoftext|>`, is not the end of its turns."""
    test_chat.write(folder, "qwen2.5", eos_token="<|endoftext|>")
    load_tokenizer.cache_clear()
    tokenizer = load_tokenizer(str(folder))
    shape = ModelShape(tokenizer.n_vocab, context, **SIZES, **QWEN2)
    # larger than at the start of training, so that an answer depends on the prompt
    state = {name: x * 8 for name, x in Transformer(shape, seed=3).state_dict().items()}
    export_model(state, folder, shape=shape, eos=tokenizer.eot)
    return folder


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

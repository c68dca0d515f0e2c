"""The jobs of `python benchmark.py plan`, and the files that they need: all made up."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.model.weights import export_model
from minigrpo.runtime.published import published_shape

from .workload import byte_tokenizer

GPT2_TOKENS = 50257
NUM_PROMPTS = 256  # in made-up data
Settings = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Settings of a run, and what is made for it."""

    settings: Settings
    shape: ModelShape | None = None  # of random weights; None: what the settings say
    tokens: int = 0  # in the vocabulary; 0: the default tokenizer
    prompt_len: int = 0  # tokens in each made-up prompt; 0: the task's own prompts
    steps: int = 0  # most that are measured; 0: as many as asked for

    def prepare(self, folder: Path) -> Settings:
        """Write the job's files, and return its settings with their paths."""
        settings = dict(self.settings)
        tokens = self.shape.vocab_size if self.shape else self.tokens
        if tokens:
            settings["tokenizer"] = str(write_tokenizer(folder / f"{tokens}.tiktoken", tokens))
        if self.shape:
            state = Transformer(self.shape).state_dict()
            export_model(state, folder / "model", shape=self.shape, eos=tokens - 1)
            settings["init_from"] = str(folder / "model")
        if self.prompt_len:
            answer_len = settings["max_new_tokens"] - 1  # the last token ends it
            data = write_pairs(folder / "pairs.jsonl", self.prompt_len, answer_len)
            settings["data"] = str(data)
        return settings


def write_tokenizer(path: Path, size: int) -> Path:
    """A vocabulary of a size, whose tokens are one to three bytes, as a file of ranks."""
    tokenizer = byte_tokenizer(size)
    never = {*tokenizer.special.values()}
    ranks = [(token, rank) for rank, token in tokenizer.tokens.items() if rank not in never]
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks)
    path.write_bytes(b"".join(lines))
    return path


def write_pairs(path: Path, prompt_len: int, answer_len: int) -> Path:
    """Random prompts and answers of these lengths: words of one letter, which are one token."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))

    def text(length: int) -> str:
        return "".join(f" {letter}" for letter in rng.choice(letters, length))

    pairs = ({"prompt": text(prompt_len), "answer": text(answer_len)} for _ in range(NUM_PROMPTS))
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def published(name: str) -> ModelShape:
    shape = published_shape(name)
    assert shape is not None
    return shape


GPT2: Settings = {
    "init_from": "scratch",
    "layers": 12,
    "width": 768,
    "heads": 12,
    "prompts_per_step": 2,
    "group_size": 8,
    "max_new_tokens": 48,
    "kl_coef": 0.04,
}
LEAN: Settings = {
    "micro_batch_size": 1,
    "rollout_batch_size": 1,
    "gradient_checkpointing": True,
    "chunked_logprobs": True,
    "share_prompt_kv": True,
    "offload_reference": True,
}
OPEN: Settings = {"prompts_per_step": 2, "group_size": 8, "max_new_tokens": 48, "kl_coef": 0.04}
LORA: Settings = {"lora_rank": 8, "base_dtype": "bfloat16"}
# about as large as GPT-2
QWEN_120M = replace(
    published("Qwen/Qwen2.5-0.5B"),
    vocab_size=GPT2_TOKENS,
    layers=12,
    width=768,
    heads=12,
    kv_heads=4,
    head_dim=64,
    mlp_width=2048,
)
JOBS: Mapping[str, Job] = {
    "default": Job({}),
    "gpt2": Job(GPT2, tokens=GPT2_TOKENS),
    "lean": Job({**GPT2, **LEAN}, tokens=GPT2_TOKENS),
    "supervised": Job({"loss": "nll"}),
    "qwen-120m": Job(OPEN, QWEN_120M, prompt_len=80),
    "qwen-120m-lora": Job({**OPEN, **LORA}, QWEN_120M, prompt_len=80),
    "qwen2.5-0.5b": Job(
        {**LEAN, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 64},
        published("Qwen/Qwen2.5-0.5B"),
        prompt_len=128,
        steps=3,
    ),
}

"""Small tokenizers, models and settings that the tests share. Nothing here takes a second."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from minigrpo.config import Config
from minigrpo.errors import ConfigError
from minigrpo.statistics import PartlyKnown

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
]
# family -> special tokens, other added tokens, end of text
FAMILIES = {
    "qwen": (CHATML, ["<think>", "</think>", "<é b>"], "<|endoftext|>"),
    "llama": (LLAMA3, [], "<|end_of_text|>"),
    "smollm": (CHATML, [], "<|im_end|>"),
    "gpt2": (["<|endoftext|>"], [], "<|endoftext|>"),
    "mistral": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], [], "</s>"),
}
# what the published tokenizers split a text into before merging
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"qwen": r"\p{N}", "llama": r"\p{N}{1,3}"}
PROSE = """The user asks and the assistant answers: what is 12 + 34? It's 46, isn't it.
    def add(first, second):
        return first + second  # the café's naïve sum, 1,000 times
Ελλάδα Привет 象棋 日本語 한국어 😀 system user assistant

The end of the text, the end of the turn.
"""
ROOT = Path(__file__).parents[1]
SUMS = str(ROOT / "examples" / "sums.jsonl")
TEMPLATES = ROOT / "tests" / "templates"  # published ones in short
# a default system message, contents as they are
QWEN_TEMPLATE = (TEMPLATES / "qwen2.5.jinja").read_text("utf-8")


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def refused(function: Callable[..., Any], *args: Any, **settings: Any) -> str:
    """Assert that a call is refused, as input that cannot be used; in which words."""
    with pytest.raises(ConfigError) as error:
        function(*args, **settings)
    return str(error.value)


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    with suppress(OSError):
        return _status(pid)[0] != "Z"
    return False


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and that those have, in order."""
    found = [pid]
    for one in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if int(_status(one)[1]) in found:
                found.append(one)
    return found[1:]


def _status(pid: int) -> list[str]:
    """The state and the parent of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write a line of JSON for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def published_template(name: str) -> str:
    """A chat template that TRL brings."""
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def ask(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def tiny_tokenizer_folder(
    folder: Path, family: str = "qwen", *, template: str | None = QWEN_TEMPLATE, **config: Any
) -> Path:
    """Write a tokenizer of some 400 tokens that is built like a published family's.

    Its end of text is not the end of its turns. `config`: more of tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special, _, end = FAMILIES[family]
    settings = {"eos_token": end, "bos_token": special[0], "chat_template": template, **config}
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer.json").write_text(trained(family), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def change_flags(folder: Path, in_config: bool = False, **flags: bool) -> Path:
    """Give a tokenizer's special tokens other flags, by one of the two files that have them."""
    place = folder / "tokenizer.json"
    tokenizer = read_json(place)
    special = [entry for entry in tokenizer["added_tokens"] if entry["special"]]
    if in_config:
        place = folder / "tokenizer_config.json"
        changed = {entry.pop("id"): {**entry, **flags} for entry in special}
        config = read_json(place)
        place.write_text(json.dumps({**config, "added_tokens_decoder": changed}), "utf-8")
    else:
        for entry in special:
            entry.update(flags)
        place.write_text(json.dumps(tokenizer), "utf-8")
    return folder


@cache
def trained(family: str) -> str:
    """The contents of a tokenizer.json."""
    special, added, _ = FAMILIES[family]
    spaced, first = family == "mistral", family in ("smollm", "mistral")
    tokenizer = Tokenizer(models.BPE(byte_fallback=spaced, unk_token="<unk>" if spaced else None))
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family not in DIGITS)
        before = [pre_tokenizers.Digits(individual_digits=True)]
        if family in DIGITS:
            pattern = Regex(PATTERN.replace("DIGITS", DIGITS[family]))
            before = [pre_tokenizers.Split(pattern, "isolated")]
        steps = [*before, by_gpt2] if family != "gpt2" else [by_gpt2]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special if first else [],  # SmolLM2's take the first numbers
        initial_alphabet=[] if spaced else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE * 3], trainer)
    tokenizer.add_special_tokens(special[:5])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    found = json.loads(tokenizer.to_str())
    # bytes are tokens of the vocabulary, and no special ones
    found["added_tokens"] = [x for x in found["added_tokens"] if not x["content"].startswith("<0x")]
    found["model"]["ignore_merges"] = family == "llama"
    if family in ("llama", "mistral"):
        begin = {"llama": special[0], "mistral": "<s>"}[family]
        found["post_processor"] = starts_with(begin, tokenizer.token_to_id(begin))
    return json.dumps(found)


def starts_with(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token before every text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def tiny_chat_model(folder: Path, context: int = 160) -> Path:
    """Write a Qwen2 of one layer with its tokenizer and chat template."""
    from minigrpo import Transformer

    tiny_tokenizer_folder(folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = {"model_type": "qwen2", "vocab_size": size, "max_position_embeddings": context}
    config |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    model = Transformer.from_pretrained(folder)  # random weights
    # larger than at the start of training, so that an answer depends on the prompt
    model.load_state_dict({name: x * 8 for name, x in model.state_dict().items()})
    model.save_pretrained(folder / "model.safetensors")
    return folder


def tiny_chess_model(folder: Path, context: int = 192) -> Path:
    """Write the config.json of a GPT-2 of one layer for the chess tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 360, "n_positions": context, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return folder


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# the settings of a run that takes a second; `model` and `out_dir` are missing
TINY = {
    "prompts_per_step": 4,
    "group_size": 3,
    "max_new_tokens": 6,
    "max_steps": 4,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "eval_size": 8,
    "eval_every": 2,
    "save_every": 2,
    "keep_last": 5,
    "reward_weights": {"similarity": 1.0},
}


def partly_known(rows: Sequence[Sequence[float | None]]) -> PartlyKnown:
    known = np.array([[number is not None for number in row] for row in rows])
    return PartlyKnown(np.array([[number or 0.0 for number in row] for row in rows]), known)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a command's arguments."""
    return [x for name, v in settings.items() for x in ("--" + name.replace("_", "-"), str(v))]


GOLDEN = ROOT / "tests" / "golden"


def toml(config: Config, **versions: str) -> str:
    """The config.toml of a run."""
    return tomli_w.dumps({**config.model_dump(exclude_none=True), "versions": versions})


def golden(name: str) -> dict[str, Any]:
    """The contents of tests/golden/NAME.json."""
    return dict(read_json(GOLDEN / f"{name}.json"))


def check_golden(name: str, part: str, made: Any) -> None:
    """Assert that a part of a golden file is what a peer has just made.

    `MAKE_GOLDEN=1 pytest -m peer` writes it instead.
    """
    if os.environ.get("MAKE_GOLDEN"):
        path = GOLDEN / f"{name}.json"
        parts = (golden(name) if path.exists() else {}) | {part: made}
        rows = (f"{json.dumps(key)}: {json.dumps(parts[key])}" for key in sorted(parts))
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")  # a line for each part
    assert golden(name)[part] == json.loads(json.dumps(made))

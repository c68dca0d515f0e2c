"""Small tokenizers of each family of open models, trained with the `tokenizers` package.

Pre-tokenizer, normalizer, added tokens and post-processor are those of the published ones.
"""

import json
from pathlib import Path
from typing import Any

from . import hostile
from .bpe import LLAMA, QWEN

SIZE = 3000
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN25 = [*CHATML, "<|object_ref_start|>", "<|vision_start|>", "<|fim_prefix|>"]
SMOLLM = [*CHATML, "<repo_name>", "<reponame>", "<file_sep>", "<gh_stars>", "<empty_output>"]
LLAMA3 = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
]
RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(248)]
THINK = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
]
# family -> pattern, special tokens, other added tokens, what tokenizer_config.json says
FAMILIES: dict[str, tuple[str, list[str], list[str], str]] = {
    "qwen2": (QWEN, CHATML, [], "<|im_end|>"),
    "qwen2.5": (QWEN, QWEN25, THINK[:2], "<|im_end|>"),
    "qwen3": (QWEN, QWEN25, THINK, "<|im_end|>"),
    "llama3": (LLAMA, [*LLAMA3, *RESERVED], [], "<|eot_id|>"),
    "smollm2": ("", SMOLLM, [], "<|im_end|>"),
    "smollm3": (LLAMA, [*LLAMA3, "<|im_start|>", "<|im_end|>", *RESERVED], THINK, "<|im_end|>"),
    "gpt2": ("gpt2", ["<|endoftext|>"], [], "<|endoftext|>"),
}


def train(family: str, folder: Path) -> Any:
    """Write a model's tokenizer files; return the package's own tokenizer of them."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    pattern, special, added, eos = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in ("", "gpt2"))
    before = {"": [pre_tokenizers.Digits(individual_digits=True)], "gpt2": []}.get(
        pattern, [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    first = family == "smollm2"  # its special tokens take the first numbers
    tokenizer.train_from_iterator(
        hostile.corpus(),
        trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=special if first else [],
            # SmolLM2's lacks the bytes that its training data did not have
            initial_alphabet=[] if first else pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)
    found = json.loads(tokenizer.to_str())
    for entry in found["added_tokens"]:
        entry["normalized"] = False
    if pattern == LLAMA:
        _as_llama(found)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _as_llama(found: dict[str, Any]) -> None:
    """All ways to merge each token, from the ranks alone, as Llama 3's were made; and its BOS."""
    vocab = found["model"]["vocab"]
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        pairs = [(token[:size], token[size:]) for size in range(1, len(token))]
        known = [pair for pair in pairs if set(pair) <= vocab.keys()]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    found["model"] |= {"merges": merges, "ignore_merges": True}
    begin = LLAMA3[0]
    number = next(e["id"] for e in found["added_tokens"] if e["content"] == begin)
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    processors = [{**found["decoder"], "trim_offsets": True}, template]
    found["post_processor"] = {"type": "Sequence", "processors": processors}

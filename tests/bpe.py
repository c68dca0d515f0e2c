"""A byte-pair encoding that a test can train quickly, and its files in several formats."""

import base64
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regex

from minigrpo.model.vocabulary import END_OF_TEXT, GPT2_PATTERN
from minigrpo.tasks.chess_env import ChessEnv

Merge = tuple[bytes, bytes]


def learn(text: str, number: int, pattern: str = GPT2_PATTERN) -> list[Merge]:
    """Merge the most frequent pair of neighbours `number` times, within the pattern's pieces."""
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(pattern, text)]
    merges = list[Merge]()
    for _ in range(number):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = [_merged(word, merges[-1]) for word in words]
    return merges


def _merged(word: list[bytes], merge: Merge) -> list[bytes]:
    out = list[bytes]()
    for token in word:
        if out and (out[-1], token) == merge:
            out[-1] += token
        else:
            out.append(token)
    return out


def chess_merges(number: int = 60) -> list[Merge]:
    env = ChessEnv(0)
    return learn(
        "\n".join(example.prompt + example.answer for example in map(env.train, range(30))), number
    )


def write_ranks(path: Path, merges: list[Merge]) -> Path:
    """Write a .tiktoken file."""
    tokens = [bytes([byte]) for byte in range(256)] + [a + b for a, b in merges]
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )
    return path


PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
# bytes that are not printable become letters from U+0100 on
LETTERS = {byte: chr(byte) for byte in PLAIN} | {
    byte: chr(256 + i) for i, byte in enumerate(OTHERS)
}


def spell(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)


def write_gpt2(
    folder: Path, merges: list[Merge], names: tuple[str, str] = ("vocab.bpe", "encoder.json")
) -> Path:
    """Write merges and vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*LETTERS.values(), *(spell(a + b) for a, b in merges), END_OF_TEXT]
    lines = ["#version: 0.2", *(f"{spell(a)} {spell(b)}" for a, b in merges)]
    (folder / names[0]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / names[1]).write_text(
        json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8"
    )
    return folder


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# the steps before merging, in Hugging Face's words
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{**BYTE_LEVEL, "use_regex": True}],
    "qwen": [split(QWEN), {**BYTE_LEVEL, "use_regex": False}],
    "llama": [split(LLAMA), {**BYTE_LEVEL, "use_regex": False}],
    "smollm": [DIGITS, {**BYTE_LEVEL, "use_regex": True}],
}


def tokenizer_json(
    merges: Sequence[Merge],
    family: str,
    special: Sequence[str] = (END_OF_TEXT, "<|im_start|>", "<|im_end|>"),
    added: Sequence[str] = (),
) -> dict[str, Any]:
    """What a tokenizer.json says. SmolLM's special tokens take the first numbers."""
    ordinary = [*map(spell, (bytes([byte]) for byte in range(256)))]
    ordinary += [spell(left + right) for left, right in merges]
    names = [*special, *added]
    tokens = [*names, *ordinary] if family == "smollm" else [*ordinary, *names]
    numbers = {token: number for number, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": numbers[name], "content": name, **flags, "special": name in special}
            for name in names
        ],
        "normalizer": {"type": "NFC"} if family == "qwen" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[family]},
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": family == "llama",
            "vocab": {
                token: n for token, n in numbers.items() if family == "smollm" or token not in names
            },
            "merges": [f"{spell(left)} {spell(right)}" for left, right in merges],
        },
    }


def write_folder(folder: Path, found: dict[str, Any], **files: dict[str, Any]) -> Path:
    """Write a tokenizer.json, and other JSON files by their names without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": found, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def encode(found: dict[str, Any], pattern: str, text: str) -> list[int]:
    """Encode by the list of merges alone, as Hugging Face's implementation is documented."""
    numbers, ids = found["model"]["vocab"], list[int]()
    order = {tuple(merge.split(" ")): n for n, merge in enumerate(found["model"]["merges"])}
    for piece in regex.findall(pattern, text):
        parts = [letter for letter in spell(piece.encode()) if letter in numbers]
        if found["model"]["ignore_merges"] and spell(piece.encode()) in numbers:
            parts = [spell(piece.encode())]
        while known := [pair for pair in itertools.pairwise(parts) if pair in order]:
            first = [*itertools.pairwise(parts)].index(min(known, key=order.__getitem__))
            parts[first : first + 2] = ["".join(parts[first : first + 2])]
        ids += [numbers[part] for part in parts]
    return ids

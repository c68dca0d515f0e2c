"""A byte-pair encoding that a test can train quickly, and its files in GPT-2's format."""

import base64
import itertools
import json
from collections import Counter
from pathlib import Path

import regex

from minigrpo.model.tokenizer import END_OF_TEXT, GPT2_PATTERN
from minigrpo.tasks.chess_env import ChessEnv

Merge = tuple[bytes, bytes]


def learn(text: str, number: int) -> list[Merge]:
    """Merge the most frequent pair of neighbours `number` times, within GPT-2's pieces."""
    words = [
        [bytes([byte]) for byte in word.encode()] for word in regex.findall(GPT2_PATTERN, text)
    ]
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


def write_gpt2(
    folder: Path, merges: list[Merge], names: tuple[str, str] = ("vocab.bpe", "encoder.json")
) -> Path:
    """Write merges and vocabulary; bytes that are not printable become letters from U+0100 on."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {
        byte: chr(256 + i)
        for i, byte in enumerate(byte for byte in range(256) if byte not in letters)
    }

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    tokens = [*letters.values(), *(spell(a + b) for a, b in merges), END_OF_TEXT]
    lines = ["#version: 0.2", *(f"{spell(a)} {spell(b)}" for a, b in merges)]
    (folder / names[0]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / names[1]).write_text(
        json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8"
    )
    return folder

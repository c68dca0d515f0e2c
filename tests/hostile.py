"""Texts that tokenizers get wrong, made from a seed, and texts to train a tokenizer on."""

import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = """
    the model's DON'T we'LL I'm 'ſ x' naïve ﬁ Ελλάδα Привет مرحبا שלום नमस्ते สวัสดี 한국어 象棋 日本語
    😀 🇩🇪 ❤️ 0 7 12 123 1234 3.14159 1e-5 ½ ٣ Ⅷ ² 1,000,000 x1y22z333 #!$%^&*() ... === "a":
"""
# not in normal form C, or with marks that it reorders; then parts of no alphabet
MARKS = (
    "cafe\u0301 A\u030a \u304b\u3099 \u1112\u1161\u11ab a\u0323\u0307 \u0338> \u0344 \u212b \u0958"
)
STRANGE = "\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL} \U00040000 \U000e0041 \U000f0000"
WORDS = [*f"{SCRIPTS} {MARKS} {STRANGE}".split(), "def f(x):\n    return x", "{'a': [1, 2]}"]
SPACES = [
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", " \u00a0 ", "\t\t\n\n  \n"),
    *"\u00a0\u2003\u3000\u2028\u0085\u200b\ufeff\v\f\x1c\x1f",
]
CONTROLS = [*map(chr, range(32)), *"\x7f\u0300\u0301\u200d\ufe0f\ufdd0\uffff"]
NOT_SURROGATES = [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]


def corpus() -> list[str]:
    """Some 700,000 characters of prose, code and other scripts."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("minigrpo/**/*.py")]
    rng = random.Random(1)
    mixed = [
        " ".join(rng.choice(WORDS) + rng.choice(["", rng.choice(SPACES)]) for _ in range(30))
        for _ in range(300)
    ]
    return [file.read_text() for file in sorted(files)] + mixed


def texts(
    number: int, special: Sequence[str] = (), seed: int = 0, runs: int = 20_000
) -> Iterator[str]:
    """Texts of many kinds, with pieces of `special` among the words, and a few long runs."""
    rng = random.Random(seed)
    names = [*special, "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|", "|>", "<", ">"]
    prose = "\n".join(corpus())

    def word() -> str:
        kind = rng.randrange(12)
        if kind < 4:
            return rng.choice(WORDS)
        if kind < 6:
            return rng.choice(SPACES) * rng.choice([1, 1, 2, 7])
        if kind == 6:
            return rng.choice(CONTROLS)
        if kind == 7:
            name = rng.choice(names)
            return rng.choice([name, name[:-1], name[1:], name.upper(), name[:3] + " " + name[3:]])
        if kind == 8:
            return "".join(rng.choices("0123456789 .,", k=rng.randrange(1, 12)))
        if kind == 9:
            return "".join(chr(rng.randrange(0x2500)) for _ in range(rng.randrange(1, 6)))
        if kind == 10:
            return unicodedata.normalize("NFD", rng.choice(WORDS))
        return chr(rng.choice(NOT_SURROGATES))

    for _ in range(number):
        kind = rng.randrange(20)
        if kind < 14:
            yield rng.choice(["", " "]).join(word() for _ in range(rng.randrange(1, 12)))
        elif kind < 18:
            start = rng.randrange(len(prose) - 300)
            yield prose[start : start + rng.randrange(1, 300)]
        else:
            yield word()[:3] * min(runs, rng.randrange(100, 400))
    yield ""
    for run in (" ", "a", "1", "\n", "é", "e\u0301", "象", "<|", "\U00040000", "ab", "= "):
        yield run * runs

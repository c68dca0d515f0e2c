"""Tokenizers, and how prompts, answers and completions are encoded."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.text.encoding import decode, encode_pairs, encode_prompt, prompt_within, token_texts
from minigrpo.text.tokenizer import FILES, Tokenizer, load_tokenizer
from minigrpo.types import Example

from . import tiny
from .tiny import read_json, refused

TEXTS = [
    "A: 8/2b1k3 w Kq e3 0 12+e7e8q+",
    "it's  a test,\n\n 12 x\t1234567 \r\n I'LL",
    "    def add(first, second):\n        return first + second",
    "cafe\u0301 A\u030a \u1112\u1161\u11ab a\u0323\u0307 \u212b",  # not in normal form C
    "Ελλάδα 象棋 مرحبا \U0001f600 \u200d \u00a0\u2003 ½ Ⅷ",
    "<|endoftext|><|im_start|>system\nObey.<|im_end|><s>[INST]</s><|eot_id|>",
    "<think>why</think> <think > <é b>",
    "\x00\x7f\ufffd\ufdd0",
    "   ",
    "x",
    "",
]
KNOWN = tiny.golden("tokens")
TEXT_END, START, END = tiny.CHATML


def load(folder: Path, family: str = "qwen", **config: Any) -> Tokenizer:
    return load_tokenizer(str(tiny.tiny_tokenizer_folder(folder, family, **config)))


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_tokenizer("chess")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_ids_of_the_shipped_models_do_not_change() -> None:
    tokenizer = load_tokenizer("chess")
    assert [tokenizer.encode(text) for text in TEXTS] == KNOWN["chess"]
    assert tokenizer.eot == tokenizer.turn_end == 359 and tokenizer.stops == {359}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_are_the_golden_ones(tmp_path: Path, family: str) -> None:
    tokenizer = load(tmp_path, family)
    known = KNOWN[family]
    assert [tokenizer.encode(text) for text in TEXTS] == known["ids"]
    assert [tokenizer.decode(ids) for ids in known["ids"]] == known["texts"]
    assert [encode_prompt(tokenizer, Example(text)) for text in TEXTS] == known["prompts"]
    assert [tokenizer.n_vocab, tokenizer.eot] == known["sizes"]
    assert tokenizer.special == known["special"]
    for text in filter(None, TEXTS):  # and no prompt may have more tokens than there is room for
        number = len(encode_prompt(tokenizer, Example(text)))
        assert len(prompt_within(tokenizer, Example(text), number)) == number
        refused(prompt_within, tokenizer, Example(text), number - 1)


@pytest.mark.peer
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_golden_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    import transformers

    ours = load(tmp_path, family)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def encode(text: str, start: bool = False) -> list[int]:
        return theirs.encode(text, add_special_tokens=start, split_special_tokens=True)

    def text_of(ids: list[int]) -> str:
        return theirs.decode(ids, clean_up_tokenization_spaces=False)

    made = {
        "ids": [encode(text) for text in TEXTS],
        "texts": [text_of(encode(text)) for text in TEXTS],
        "prompts": [encode(text, start=True) for text in TEXTS],
        "sizes": [len(theirs), theirs.eos_token_id],
        "special": {name: theirs.convert_tokens_to_ids(name) for name in tiny.FAMILIES[family][0]},
    }
    tiny.check_golden("tokens", family, made)
    rng = random.Random(7)
    for _ in range(300):  # and random mixtures of pieces
        pieces = rng.choices(TEXTS, k=rng.randrange(9))
        text = "".join(piece[rng.randrange(9) :][:7] for piece in pieces)
        assert ours.encode(text) == encode(text), ascii(text)
        assert ours.decode(encode(text)) == text_of(encode(text)), ascii(text)


def test_decoding_leaves_out_stops_and_shows_other_special_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    text = f"{START}a{END}{TEXT_END}"
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids) == f"{START}a"
    assert tokenizer.text_of(ids) == text


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_each_token_has_a_text_of_its_own(tmp_path: Path, family: str) -> None:
    tokenizer = load(tmp_path, family)
    ids = tokenizer.encode("a cat\U0001f601")  # the last character is of several tokens
    texts = token_texts(tokenizer, ids)
    assert "".join(texts).lstrip().rstrip("\ufffd") == "a cat"
    assert texts[-1] == "\ufffd"
    assert len(texts) == len(ids)


@pytest.mark.parametrize(
    ("named", "eot"), [(END, END), ({"content": START}, START), (None, TEXT_END)], ids=str
)
def test_the_settings_say_which_token_ends_a_text(tmp_path: Path, named: Any, eot: str) -> None:
    """Without a chat template, which may add an end of its turns."""
    tokenizer = load(tmp_path, template=None, eos_token=named)
    number = tokenizer.eot
    assert tokenizer.text_of([number]) == eot
    assert tokenizer.turn_end == number
    assert tokenizer.stops == {number}


def test_all_files_say_which_tokens_end_a_completion(tmp_path: Path) -> None:
    ids = load(tmp_path).special
    several = {"eos_token_id": [5000, ids[START], 7]}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[END]}))
    (tmp_path / "generation_config.json").write_text(json.dumps(several))
    tokenizer = load(tmp_path, template=None)
    assert tokenizer.eot == ids[TEXT_END]
    assert tokenizer.stops == {*ids.values(), 7}
    assert tokenizer.decode([7]) != ""  # an ordinary token is shown, even where it is a stop


def change(folder: Path, **values: Any) -> Tokenizer:
    """The tokenizer of a folder after a change of its tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**read_json(file), **values}))
    return load_tokenizer(str(folder))


def test_a_token_that_ends_texts_is_special_whatever_its_entry_says(tmp_path: Path) -> None:
    ids = load(tmp_path).special
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[END]}))
    entries = read_json(tmp_path / "tokenizer.json")["added_tokens"]
    tokenizer = change(tmp_path, added_tokens=[{**entry, "special": False} for entry in entries])
    assert set(tokenizer.special) == {END, TEXT_END}
    assert tokenizer.encode(START) == [ids[START]]
    assert ids[END] not in tokenizer.encode(END)


SWALLOWS = [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}]
SPACED = f"a \n{START} b \n{END} \nc {TEXT_END} \n"


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("flags", SWALLOWS)
def test_special_tokens_swallow_white_space(
    tmp_path: Path, flags: dict[str, bool], in_config: bool
) -> None:
    """Also those that the settings name; tokenizer_config.json counts above tokenizer.json."""
    folder = tiny.change_flags(tiny.tiny_tokenizer_folder(tmp_path), in_config, **flags)
    tokenizer = load_tokenizer(str(folder))
    found = tokenizer.encode(SPACED, special=True)
    assert len(SPACED) - len(tokenizer.text_of(found)) == 5 * sum(flags.values())


def test_a_limit_or_padding_in_the_file_changes_no_prompt(tmp_path: Path) -> None:
    text = "one two three"
    ids = load(tmp_path).encode(text)
    file = tmp_path / "tokenizer.json"
    engine = tokenizers.Tokenizer.from_file(str(file))
    engine.enable_truncation(2)
    engine.enable_padding(length=99)
    engine.save(str(file))
    assert load_tokenizer(str(tmp_path)).encode(text) == ids


def test_a_fingerprint_is_that_of_all_that_makes_tokens_and_ends_texts(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    first = load(folder)
    copied = shutil.copytree(folder, tmp_path / "b")
    assert {file.name for file in copied.iterdir()} <= {*FILES}
    again = load_tokenizer(str(copied / "tokenizer.json"))
    assert (again.fingerprint, again.source) == (first.fingerprint, copied)
    tokenizer = read_json(folder / "tokenizer.json")
    merges = [*tokenizer["model"]["merges"]]
    others = [
        change(folder, model={**tokenizer["model"], "merges": merges[1:] + merges[:1]}),
        change(folder, normalizer=None),
        change(folder, added_tokens=[{**x, "rstrip": True} for x in tokenizer["added_tokens"]]),
        load(folder, eos_token=START),
        load(folder, template=tiny.QWEN_TEMPLATE + " "),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_what_would_give_wrong_tokens_is_refused(tmp_path: Path) -> None:
    file = tiny.tiny_tokenizer_folder(tmp_path) / "tokenizer.json"
    whole = file.read_text()
    hole = json.loads(whole)
    hole["model"]["vocab"]["x"] += 1000
    without_end = whole.replace(TEXT_END, "<|other|>")
    for damaged in (json.dumps(hole), without_end, whole[:1000]):
        file.write_text(damaged)
        refused(load_tokenizer, str(tmp_path))


def test_prompt_and_answer_are_encoded_separately(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    prompt, answer = tokenizer.encode("the us"), tokenizer.encode("er asks")
    assert tokenizer.encode("the user asks") != prompt + answer  # so it matters
    pairs = encode_pairs(tokenizer, [Example("the us", "er asks"), Example("x", "")], 40)
    prompts = zip(pairs.prompt_ids, pairs.prompt_len, strict=True)
    assert [ids[:n].tolist() for ids, n in prompts] == [prompt, tokenizer.encode("x")]
    completions = zip(pairs.completion_ids, pairs.completion_mask, strict=True)
    end = tokenizer.eot
    assert [ids[mask].tolist() for ids, mask in completions] == [[*answer, end], [end]]
    assert decode(tokenizer, pairs) == [["er asks"], [""]]


@pytest.mark.parametrize(
    ("example", "context"),
    [
        (Example("", "a"), 9),
        (Example("abcdefghi", ""), 9),
        (Example("abcd", "efgh"), 8),
        (Example("12?", "a", messages=tiny.ask("12?")), 99),  # no chat template
        (Example("a\ud83d", "b"), 99),  # half a character
        (Example("a", "b\ud83d"), 99),
    ],
)
def test_what_does_not_fit_the_model_is_refused(example: Example, context: int) -> None:
    tokenizer = load_tokenizer("chess")
    assert len(encode_pairs(tokenizer, [Example("abcd", "efgh")], 9)) == 1
    asked = [Example("a", "b"), replace(example, index=7)]
    assert "example 7" in refused(encode_pairs, tokenizer, asked, context)

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

from minigrpo.model.encoding import (
    check_prompt,
    decode,
    encode_pairs,
    encode_prompt,
    encode_prompts,
    token_texts,
)
from minigrpo.model.tokenizer import FILES, Tokenizer, load_tokenizer
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
    tokenizer, known = load(tmp_path, family), KNOWN[family]
    assert [tokenizer.encode(text) for text in TEXTS] == known["ids"]
    assert [tokenizer.decode(ids) for ids in known["ids"]] == known["texts"]
    assert [encode_prompt(tokenizer, Example(text)) for text in TEXTS] == known["prompts"]
    assert [tokenizer.n_vocab, tokenizer.eot] == known["sizes"]
    assert tokenizer.special == known["special"]


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

    ids = [encode(text) for text in TEXTS]
    made = {
        "ids": ids,
        "texts": [text_of(row) for row in ids],
        "prompts": [encode(text, True) for text in TEXTS],
        "sizes": [len(theirs), theirs.eos_token_id],
        "special": {name: theirs.convert_tokens_to_ids(name) for name in tiny.FAMILIES[family][0]},
    }
    tiny.check_golden("tokens", family, made)
    rng = random.Random(7)
    for _ in range(300):  # and random mixtures of pieces
        text = "".join(rng.choice(TEXTS)[rng.randrange(9) :][:7] for _ in range(rng.randrange(9)))
        assert ours.encode(text) == encode(text), ascii(text)
        assert ours.decode(encode(text)) == text_of(encode(text)), ascii(text)


def test_decoding_leaves_out_stops_and_shows_other_special_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    start, end, eot = (tokenizer.special[name] for name in tiny.CHATML[1:] + tiny.CHATML[:1])
    ids = [start, *tokenizer.encode("a"), end, eot]
    assert tokenizer.stops == {end, eot} and tokenizer.turn_end == end and tokenizer.eot == eot
    assert tokenizer.decode(ids) == "<|im_start|>a"
    assert tokenizer.text_of(ids) == "<|im_start|>a<|im_end|><|endoftext|>"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_texts_of_tokens_have_whole_characters(tmp_path: Path, family: str) -> None:
    tokenizer = load(tmp_path, family)
    ids = tokenizer.encode("aé象\U0001f601")  # the last is of four tokens
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) > 5 and "".join(texts).lstrip() == "aé象\U0001f601"
    assert token_texts(tokenizer, ids[:-1])[-1].endswith("\ufffd")  # ends within a character


TEXT_END, START, END = tiny.CHATML


def test_all_files_say_which_tokens_end_a_completion(tmp_path: Path) -> None:
    """Without a chat template, which may add an end of its turns."""
    ids = load(tmp_path).special
    for named, eot in ((END, END), ({"content": START}, START), (None, TEXT_END)):
        tokenizer = load(tmp_path, template=None, eos_token=named)
        assert tokenizer.eot == tokenizer.turn_end == ids[eot]
        assert tokenizer.stops == {ids[eot]}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[END]}))
    several = json.dumps({"eos_token_id": [5000, ids[START], 7]})
    (tmp_path / "generation_config.json").write_text(several)
    tokenizer = load(tmp_path, template=None)
    assert tokenizer.eot == ids[TEXT_END] and tokenizer.stops == {*map(ids.get, tiny.CHATML), 7}
    assert tokenizer.decode([7]) != ""  # an ordinary token is shown, even where it is a stop


def change(folder: Path, **values: Any) -> Tokenizer:
    """The tokenizer of a folder after a change of its tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**read_json(file), **values}))
    return load_tokenizer(str(folder))


def test_a_token_that_ends_texts_is_special_whatever_its_entry_says(tmp_path: Path) -> None:
    plain = load(tmp_path)
    entries = read_json(tmp_path / "tokenizer.json")["added_tokens"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": plain.special[END]}))
    tokenizer = change(tmp_path, added_tokens=[{**entry, "special": False} for entry in entries])
    assert set(tokenizer.special) == {END, TEXT_END}
    assert tokenizer.encode(START) == [plain.special[START]]
    assert plain.special[END] not in tokenizer.encode(END)


SWALLOWS = [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}]
SPACED = f"a \n{START} b \n{END} \nc {TEXT_END} \n"


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.peer)])
@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("flags", SWALLOWS)
def test_special_tokens_swallow_white_space(
    tmp_path: Path, flags: dict[str, bool], in_config: bool, peer: bool
) -> None:
    """Also those that the settings name; tokenizer_config.json counts above tokenizer.json."""
    folder = tiny.change_flags(tiny.tiny_tokenizer_folder(tmp_path / "a"), in_config, **flags)
    found = load_tokenizer(str(folder)).encode(SPACED, special=True)
    if peer:
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        assert found == theirs.encode(SPACED, add_special_tokens=False)
    plain = tiny.change_flags(tiny.tiny_tokenizer_folder(tmp_path / "b"), **flags)
    engine = tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json"))
    assert found == engine.encode(SPACED, add_special_tokens=False).ids
    text = engine.decode(found, skip_special_tokens=False)
    assert len(SPACED) - len(text) == 5 * sum(flags.values())


def test_a_limit_or_padding_in_the_file_changes_no_prompt(tmp_path: Path) -> None:
    ids = load(tmp_path).encode("one two three")
    limit = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = dict.fromkeys(("pad_id", "pad_type_id"), 0) | {"pad_to_multiple_of": None}
    padding |= {"strategy": {"Fixed": 99}, "direction": "Left", "pad_token": "x"}
    assert change(tmp_path, truncation=limit, padding=padding).encode("one two three") == ids


def test_a_fingerprint_is_that_of_all_that_makes_tokens_and_ends_texts(tmp_path: Path) -> None:
    """A teacher needs the same ids alone: the vocabulary."""
    first = load(tmp_path / "a")
    tokenizer = read_json(tmp_path / "a" / "tokenizer.json")
    merges = [*tokenizer["model"]["merges"]]
    changes = [
        {"model": {**tokenizer["model"], "merges": merges[1:] + merges[:1]}},
        {"normalizer": None},
        {"added_tokens": [{**x, "rstrip": True} for x in tokenizer["added_tokens"]]},
    ]
    others = [change(tmp_path / "a", **changed) for changed in changes]
    end = "<|im_start|>"  # of a text
    others.append(load(tmp_path / "d", eos_token=end))
    others.append(load(tmp_path / "e", template=tiny.QWEN_TEMPLATE + " "))
    assert {other.vocabulary for other in others} == {first.vocabulary}
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6
    shutil.rmtree(tmp_path / "a")
    assert load(tmp_path / "a").fingerprint == first.fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert {file.name for file in (tmp_path / "b").iterdir()} <= {*FILES}
    again = load_tokenizer(str(tmp_path / "b" / "tokenizer.json"))
    assert again.fingerprint == first.fingerprint and again.source == tmp_path / "b"
    assert load(tmp_path / "c", "gpt2").vocabulary != first.vocabulary


def test_what_would_give_wrong_tokens_is_refused(tmp_path: Path) -> None:
    file = tiny.tiny_tokenizer_folder(tmp_path) / "tokenizer.json"
    whole = file.read_text()
    hole, no_end = json.loads(whole), json.loads(whole)
    hole["model"]["vocab"]["x"] += 1000
    no_end["added_tokens"][0]["content"] = "<|other|>"
    for damaged in (json.dumps(hole), json.dumps(no_end), whole[:1000]):
        file.write_text(damaged)
        refused(load_tokenizer, str(tmp_path))


ASKED = ({"role": "user", "content": "12?"},)


def test_prompt_and_answer_are_encoded_separately(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    prompt, answer = "the us", "er asks"
    joined = tokenizer.encode(prompt + answer)
    assert joined != tokenizer.encode(prompt) + tokenizer.encode(answer)  # so it matters
    pairs = encode_pairs(tokenizer, [Example(prompt, answer), Example("x", "")], 40)
    rows = [ids[:n].tolist() for ids, n in zip(pairs.prompt_ids, pairs.prompt_len, strict=True)]
    assert rows == [tokenizer.encode(prompt), tokenizer.encode("x")]
    done = [pairs.completion_ids[p][pairs.completion_mask[p]].tolist() for p in range(2)]
    assert done == [[*tokenizer.encode(answer), tokenizer.eot], [tokenizer.eot]]
    assert decode(tokenizer, pairs) == [[answer], [""]]


@pytest.mark.parametrize(
    ("example", "context"),
    [
        (Example("", "a"), 9),
        (Example("abcdefghi", ""), 9),
        (Example("abcd", "efgh"), 8),
        (Example("12?", "a", messages=ASKED), 99),  # no chat template
        (Example("a\ud83d", "b"), 99),  # half a character
        (Example("a", "b\ud83d"), 99),
    ],
)
def test_what_does_not_fit_the_model_is_refused(example: Example, context: int) -> None:
    tokenizer = load_tokenizer("chess")
    assert len(encode_pairs(tokenizer, [Example("abcd", "efgh")], 9)) == 1
    asked = [Example("a", "b"), replace(example, index=7)]
    assert "example 7" in refused(encode_pairs, tokenizer, asked, context)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_a_text_that_no_model_has_room_for_is_not_encoded(
    template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path, template=template)
    encoded = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, special=False: encoded.append(text))
    text = "a" * 200_000
    messages = ({"role": "user", "content": text},) if template else ()
    prompt, answer = Example(text, "b", messages=messages), Example("a", text)
    refused(encode_prompts, tokenizer, [prompt], 500)
    refused(encode_pairs, tokenizer, [answer], 500)
    assert not encoded


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_prompt_passes_the_check_if_its_tokens_have_room(family: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, family)
    for text in filter(None, TEXTS):
        example = Example(text)
        number = len(encode_prompt(tokenizer, example))
        check_prompt(tokenizer, example, number)
        refused(check_prompt, tokenizer, example, number - 1)

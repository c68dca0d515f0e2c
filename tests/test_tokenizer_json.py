"""Tokenizers in Hugging Face's format, and which tokens end a text."""

import copy
import itertools
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minigrpo.model.merges import check_merges
from minigrpo.model.nfc import LATER, nfc
from minigrpo.model.tokenizer import Tokenizer, load_tokenizer
from minigrpo.model.tokenizer_files import copy_tokenizer_files
from minigrpo.model.tokenizer_json import SMOLLM_PATTERN
from minigrpo.model.vocabulary import GPT2_PATTERN

from . import bpe, hostile, hub_tokenizers

PATTERNS = {"gpt2": GPT2_PATTERN, "qwen": bpe.QWEN, "llama": bpe.LLAMA, "smollm": SMOLLM_PATTERN}
THINK = ("<think>", "</think>")
Found = dict[str, Any]


@cache
def _trained(family: str) -> Found:
    text = "".join(hostile.texts(60, seed=1, runs=20)) + hostile.corpus()[0][:4000]
    merges = bpe.learn(nfc(text), 120, PATTERNS[family])
    return bpe.tokenizer_json(merges, family, added=THINK if family == "qwen" else ())


def found_of(family: str) -> Found:
    return copy.deepcopy(_trained(family))


def load(folder: Path, found: Found, **files: dict[str, Any]) -> Tokenizer:
    files = {"tokenizer_config": {"eos_token": "<|im_end|>"}, **files}
    load_tokenizer.cache_clear()
    return load_tokenizer(str(bpe.write_folder(folder, found, **files)))


def error_of(folder: Path, found: Found, **files: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="--tokenizer") as error:
        load(folder, found, **files)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"--tokenizer {folder}: ")
    return text.removeprefix(f"--tokenizer {folder}: ")


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PATTERNS)
def test_tokens_are_those_of_the_listed_merges(tmp_path: Path, family: str) -> None:
    found = found_of(family)
    tokenizer = load(tmp_path, found)
    texts = [text.replace("think>", "thin>") for text in hostile.texts(150, seed=2, runs=100)]
    for text in texts:
        plain = nfc(text) if family == "qwen" else text
        ids = tokenizer.encode(text)
        assert ids == bpe.encode(found, PATTERNS[family], plain)
        assert tokenizer.decode(ids) == plain
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.peer
@pytest.mark.parametrize("family", hub_tokenizers.FAMILIES)
def test_tokens_are_those_of_the_tokenizers_package(tmp_path: Path, family: str) -> None:
    theirs = hub_tokenizers.train(family, tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert {name: theirs.token_to_id(name) for name in ours.special} == ours.special
    assert ours.n_vocab == theirs.get_vocab_size()
    begin = theirs.encode("a").ids[: -len(ours.encode("a"))]
    assert list(ours.prefix) == begin and ours.encode_prompt("a") == [*begin, *ours.encode("a")]
    theirs.encode_special_tokens = True  # what spells one is text
    for text in hostile.texts(3000, [*ours.special][:20], seed=7):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, ascii(text[:100])
        assert ours.decode(expected, show_stops=True) == theirs.decode(
            expected, skip_special_tokens=False
        )


@pytest.mark.peer
def test_the_normal_form_is_that_of_the_tokenizers_package() -> None:
    import unicodedata

    from tokenizers import normalizers

    theirs = normalizers.NFC().normalize_str
    characters = map(chr, hostile.NOT_SURROGATES)
    known = (unicodedata.combining, unicodedata.decomposition, LATER.match)
    for character in (c for c in characters if any(is_mark(c) for is_mark in known)):
        for text in (f"a{character}\u0334", f"a\u0345{character}", f"\u0323{character}\u0301"):
            decomposed = unicodedata.normalize("NFD", text)
            assert nfc(text) == theirs(text) and nfc(decomposed) == theirs(decomposed), ascii(text)


def test_both_ways_to_write_merges_are_read(tmp_path: Path) -> None:
    found = found_of("qwen")
    plain = load(tmp_path / "a", found)
    found["model"]["merges"] = [merge.split(" ") for merge in found["model"]["merges"]]
    text = "the model's 12 words <think>"
    assert load(tmp_path / "b", found).encode(text) == plain.encode(text)


def test_a_text_is_brought_to_normal_form_between_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, found_of("qwen"))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    # composed with the mark that follows, the last character of <think> would be another one
    assert tokenizer.decode(tokenizer.encode("<think>\u0338")) == "<think>\u0338"
    assert tokenizer.encode("<think>\u0338")[0] == tokenizer.encode("<think>")[0]
    # two marks in an order that later versions of Unicode change
    assert tokenizer.decode(tokenizer.encode("a\u1df6\u0323")) == "a\u1df6\u0323"


def test_a_byte_without_a_token_is_dropped_and_its_neighbours_are_merged(tmp_path: Path) -> None:
    found = found_of("smollm")
    if ".." not in found["model"]["vocab"]:  # the corpus is this project's own documents
        found["model"]["vocab"][".."] = len(found["model"]["vocab"])
        found["model"]["merges"].append(". .")
    tokenizer = load(tmp_path / "whole", found)
    for byte in (0xF2, 0x01):
        number = found["model"]["vocab"].pop(bpe.spell(bytes([byte])))
        found["model"]["vocab"][f"zqxjzq{byte % 7}"] = number  # no merges give it
    lossy = load(tmp_path / "lossy", found)
    # `.` and the control character are one piece, so the dots become neighbours
    dots = [found["model"]["vocab"][".."]]
    assert lossy.encode(".\x01.") == dots and tokenizer.encode(".\x01.") != dots
    assert lossy.encode("a\x01b") == tokenizer.encode("a") + tokenizer.encode("b")
    assert lossy.encode("\x01") == []
    ids = lossy.encode("the\U00080000\ud800")  # four bytes without the first, half a pair
    assert (
        b"".join(lossy.tokens[number] for number in ids) == b"the\x80\x80\x80" + "\ufffd".encode()
    )
    for text in hostile.texts(100, seed=5, runs=20):
        assert lossy.encode(text) == bpe.encode(found, SMOLLM_PATTERN, text)


def test_a_word_in_the_vocabulary_needs_no_merges_where_the_file_says_so(tmp_path: Path) -> None:
    found = found_of("llama")
    vocab, word = found["model"]["vocab"], "zqxj"
    vocab[word] = max(entry["id"] for entry in found["added_tokens"]) + 1
    tokenizer = load(tmp_path / "a", found)
    assert tokenizer.encode("zqxj") == [vocab[word]]
    assert tokenizer.encode("zqxjz") == [vocab[letter] for letter in "zqxjz"]
    found["model"]["ignore_merges"] = False
    tokenizer = load(tmp_path / "b", found)
    assert tokenizer.encode("zqxj") == [vocab[letter] for letter in "zqxj"]
    assert tokenizer.decode([vocab[word]]) == "zqxj" and tokenizer.n_vocab == vocab[word] + 1


# --- special and added tokens ---------------------------------------------------------------------


def test_special_tokens_come_from_no_text_and_added_ones_from_any(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, found_of("qwen"))
    text = "<|im_start|>a<think>b</think><|im_end|><|endoftext|>"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special.values())
    assert [tokenizer.decode([number]) for number in ids if number >= 376] == list(THINK)
    assert tokenizer.decode(ids) == text
    start, end = tokenizer.special["<|im_start|>"], tokenizer.special["<|im_end|>"]
    # in the middle of a completion a special token is shown; a stop ends it
    assert tokenizer.decode([start, *tokenizer.encode("a"), end]) == "<|im_start|>a"


def test_numbers_without_a_token_are_refused(tmp_path: Path) -> None:
    """A model would sample them, and nobody would see it in the text."""
    found = found_of("llama")
    size = load(tmp_path, found).n_vocab
    names = {size + n: f"<|reserved_{n}|>" for n in range(4)}
    reserved = [{"id": n, "content": name, "special": True} for n, name in names.items()]
    found["added_tokens"] += reserved
    tokenizer = load(tmp_path, found)
    assert tokenizer.n_vocab == len(tokenizer.tokens) == size + 4 and all(tokenizer.tokens.values())
    found["added_tokens"].remove(reserved[1])
    words = f"tokenizer.json: 1 of the numbers up to {size + 3} have no token, the first is "
    assert error_of(tmp_path, found).startswith(f"{words}{size + 1}: a model can sample them")
    found["added_tokens"].append({"id": 10**15, "content": "<far>", "special": True})
    assert f"of the numbers up to {10**15} have no token" in error_of(tmp_path, found)
    found = found_of("llama")
    found["model"]["vocab"][""] = size
    assert "a token of the vocabulary is empty" in error_of(tmp_path, found)


def test_added_tokens_of_the_other_file_count(tmp_path: Path) -> None:
    entry = {"content": "<|extra|>", "special": True, "lstrip": False}
    known = {"content": "<think>", "special": False}
    found = found_of("qwen")
    number = found["added_tokens"][-1]["id"] + 1
    config = {
        "eos_token": {"content": "<|extra|>"},
        "added_tokens_decoder": {str(number): entry, str(number - 2): known},
    }
    tokenizer = load(tmp_path, found, tokenizer_config=config)
    assert tokenizer.special["<|extra|>"] == tokenizer.eot == number == tokenizer.n_vocab - 1


def test_a_token_that_ends_texts_is_special_whatever_its_entry_says(tmp_path: Path) -> None:
    found = found_of("qwen")
    for entry in found["added_tokens"]:
        entry["special"] = False
    numbers = {entry["content"]: entry["id"] for entry in found["added_tokens"]}
    config = {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", {"content": "<think>"}],
    }
    files = {"tokenizer_config": config, "config": {"eos_token_id": numbers["<|endoftext|>"]}}
    tokenizer = load(tmp_path, found, **files)
    assert set(tokenizer.special) == {"<|im_end|>", "<|im_start|>", "<|endoftext|>"}
    assert tokenizer.encode("<think>") == [numbers["<think>"]]


def test_a_plain_prompt_starts_with_what_the_post_processor_adds(tmp_path: Path) -> None:
    found = found_of("llama")
    begin = found["added_tokens"][0]
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": begin["content"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {begin["content"]: {"ids": [begin["id"]]}},
    }
    found["post_processor"] = {"type": "Sequence", "processors": [bpe.BYTE_LEVEL, template]}
    tokenizer = load(tmp_path, found)
    assert tokenizer.prefix == (begin["id"],)
    assert tokenizer.encode_prompt("the") == [begin["id"], *tokenizer.encode("the")]
    template["single"].reverse()
    assert "adds tokens after a text is not supported" in error_of(tmp_path, found)


# --- ends -----------------------------------------------------------------------------------------


def test_all_files_say_which_tokens_end_a_completion(tmp_path: Path) -> None:
    found = found_of("qwen")
    numbers = {entry["content"]: entry["id"] for entry in found["added_tokens"]}
    turn, text = numbers["<|im_end|>"], numbers["<|endoftext|>"]

    def ends(**files: Any) -> tuple[int, set[int]]:
        tokenizer = load(tmp_path, found, **files)
        return tokenizer.eot, set(tokenizer.stops)

    assert ends() == (turn, {turn})
    assert ends(config={"eos_token_id": text}) == (turn, {turn, text})
    # the second number has no token; `match_vocab` refuses a model that has one
    generation = {"eos_token_id": [text, 5000], "pad_token_id": 3}
    assert ends(generation_config=generation) == (turn, {turn, text})
    several = {"tokenizer_config": {}, "generation_config": {"eos_token_id": [text, 7]}}
    assert ends(**several) == (text, {text, 7})
    tokenizer = load(tmp_path, found, **several)  # an ordinary token is shown where it is a stop
    assert tokenizer.decode([7, text]) == tokenizer.decode([7]) != ""
    assert ends(tokenizer_config={}, config={}, generation_config={}) == (text, {text})
    missing = "in tokenizer_config.json or special_tokens_map.json is no added token of tokenizer."
    assert f"eos_token '<|no|>' {missing}" in error_of(
        tmp_path, found, tokenizer_config={"eos_token": "<|no|>"}
    )
    assert "eos_token of the tokenizer is 3, not a token" in error_of(
        tmp_path, found, tokenizer_config={"eos_token": 3}
    )
    assert "eos_token_id is '3', not a number or a list" in error_of(
        tmp_path, found, config={"eos_token_id": "3"}
    )
    found["added_tokens"][0]["content"] = "<|other|>"
    assert "no end of text: neither tokenizer_config.json nor special_tokens_map.json" in error_of(
        tmp_path, found, tokenizer_config={}, config={}, generation_config={}
    )


# the files of older tokenizers, and the end of text that transformers finds in them
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "in the map alone": ({}, {"eos_token": {"content": "<|im_end|>"}}, "<|im_end|>"),
    "in both": ({"eos_token": "<|im_start|>"}, {"eos_token": "<|im_end|>"}, "<|im_end|>"),
    "in the config": ({"eos_token": "<|im_end|>"}, {"pad_token": "<|endoftext|>"}, "<|im_end|>"),
    "newer": (
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        {"eos_token": "<|im_start|>"},
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_tokenizers_name_their_end_in_another_file(tmp_path: Path, name: str) -> None:
    config, older, end = OLDER[name]
    files = {"tokenizer_config": config, "special_tokens_map": older}
    found = found_of("qwen")
    found["added_tokens"][2]["special"] = False  # <|im_end|>, which is named all the same
    tokenizer = load(tmp_path, found, **files)
    assert tokenizer.special.get(end) == tokenizer.eot and tokenizer.stops == {tokenizer.eot}
    template = "{{ messages[0].content }}{{ eos_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    load_tokenizer.cache_clear()
    chat = load_tokenizer(str(tmp_path)).chat
    assert chat and chat.render([{"role": "user", "content": "a"}]) == f"a{end}"


@pytest.mark.peer
@pytest.mark.parametrize("name", OLDER)
def test_the_end_of_older_tokenizers_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    config, older, end = OLDER[name]
    files = {"tokenizer_config": config, "special_tokens_map": older}
    ours = load(tmp_path, found_of("qwen"), **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.eos_token == end and theirs.eos_token_id == ours.eot


def test_added_tokens_of_older_tokenizers_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    found = found_of("llama")
    number = found["added_tokens"][-1]["id"] + 1
    files = {"special_tokens_map": {"eos_token": "<|over|>"}, "tokenizer_config": {}}
    older = {"<|over|>": number, "<tool>": number + 1, "<|im_end|>": 3}  # the last one is known
    tokenizer = load(tmp_path, found, **files, added_tokens=older)
    assert tokenizer.eot == tokenizer.special["<|over|>"] == number
    assert tokenizer.encode("<tool>") == [number + 1] == [tokenizer.n_vocab - 1]
    assert "added_tokens.json: the number of '<tool>' is not 0, 1, 2" in error_of(
        tmp_path, found, **files, added_tokens={"<tool>": "7"}
    )


def test_the_files_beside_gpt2s_two_say_what_ends_a_text(tmp_path: Path) -> None:
    def load_gpt2(**files: dict[str, Any]) -> Tokenizer:
        load_tokenizer.cache_clear()
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return load_tokenizer(str(tmp_path))

    bpe.write_gpt2(tmp_path, [])
    assert load_gpt2(config={"eos_token_id": 256}).stops == {256}
    assert load_gpt2(generation_config={"eos_token_id": [256, 10]}).stops == {256, 10}
    assert load_gpt2(tokenizer_config={"eos_token": "<|endoftext|>"}).stops == {256, 10}
    with pytest.raises(ValueError, match=r"eos_token '<\|im_end\|>' is not in encoder.json"):
        load_gpt2(special_tokens_map={"eos_token": "<|im_end|>"})


# --- what is not supported ------------------------------------------------------------------------


def _set(**values: Any) -> Callable[[Found], None]:
    return lambda found: found.update(values)


def _model(**values: Any) -> Callable[[Found], None]:
    return lambda found: found["model"].update(values)


def _added(**values: Any) -> Callable[[Found], None]:
    return lambda found: found["added_tokens"][-1].update(values)


def _unknown_byte(found: Found) -> None:
    model = found["model"]
    model["vocab"]["zqxjzq"] = model["vocab"].pop(bpe.spell(b"\0"))  # no merges give it
    model["unk_token"] = "a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(normalizer={"type": "Lowercase"}), "the normalizer Lowercase is not supported; s"),
        (_set(pre_tokenizer=None), r"the pre-tokenizer \[\] is not supported; supported: those of"),
        (_set(pre_tokenizer={"type": "Metaspace"}), r"the pre-tokenizer \[Metaspace\] is not"),
        (_set(pre_tokenizer=bpe.split(r"\w+")), r"the pre-tokenizer \[Split by \\w\+\] is not"),
        (
            _set(pre_tokenizer={**bpe.BYTE_LEVEL, "add_prefix_space": True}),
            r"the pre-tokenizer \[ByteLevel add_prefix_space True trim_offsets True\] is not",
        ),
        (_set(decoder={"type": "WordPiece"}), "the decoder WordPiece is not supported"),
        (_set(post_processor={"type": "Bert"}), "the post-processor Bert is not supported"),
        (_model(type="Unigram"), "type 'Unigram' of the model is not supported; supported: 'BPE'"),
        (_model(byte_fallback=True), "byte_fallback True of the model is not supported"),
        (_unknown_byte, "a token for unknown bytes, such as 0, is not supported"),
        (_model(dropout=0.1), "dropout 0.1 of the model is not supported"),
        (_model(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>' of the model is not"),
        (_added(lstrip=True), "lstrip of the added token '</think>' is not supported"),
        (_added(normalized=True), "the added token '</think>', which is looked for after NFC"),
        (_added(id=5), "added token '</think>' cannot have the number 5"),
        (_model(vocab={"a": -1}), "has a number that is not 0, 1, 2"),
        (_model(vocab={"a": 1, "b": 1}), "two tokens of the vocabulary have the same number"),
        (_model(vocab={"▁": 1}, merges=[]), "'▁' does not stand for a byte"),
        (_model(merges=["a b c"]), "merge 'a b c' is not of two tokens"),
        (_model(merges=["☃ a"]), "merge '☃ a' is not of two tokens"),
        (_model(merges=[["a"]]), r"merge \['a'\] is not of two tokens"),
        (_set(model=3), r"is not a whole tokenizer.json \(AttributeError"),
        (_set(added_tokens=[{}]), r"is not a whole tokenizer.json \(KeyError: 'content'\)"),
    ],
)
def test_what_would_give_other_tokens_is_refused(
    tmp_path: Path, change: Callable[[Found], None], words: str
) -> None:
    found = found_of("qwen")
    change(found)
    with pytest.raises(ValueError, match=words) as error:
        load(tmp_path, found)
    assert str(error.value).startswith(f"--tokenizer {tmp_path}: tokenizer.json: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    found = found_of("qwen")
    load(tmp_path, found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found)[:1000])
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not whole JSON") as error:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(error.value)
    bad = {"added_tokens_decoder": {"a": {}}}
    assert "tokenizer_config.json: added_tokens_decoder is malformed" in error_of(
        tmp_path, found, tokenizer_config=bad
    )


# --- merges ---------------------------------------------------------------------------------------


def numbered(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(["a", "b", "c", "d", *tokens])}


def test_merging_by_number_must_be_what_the_list_gives() -> None:
    assert check_merges(numbered("ab", "abc"), ["a b", "ab c"]) == frozenset()
    # another list that merges the same pairs, and more that never meet
    assert not check_merges(numbered("ab", "abc"), ["a b", "a bc", "ab c"][::2])
    both = numbered("bc", "ab", "abc")  # b is merged with c first, so `ab c` never arises
    assert not check_merges(both, ["b c", "a b", "ab c", "a bc"])
    with pytest.raises(ValueError, match=r"'abc' is not supported: the merge \['a', 'bc'\] is not"):
        check_merges(both, ["b c", "a b", "ab c"])
    with pytest.raises(ValueError, match="'a b' is not supported: it is listed after a token"):
        check_merges(both, ["a bc", "a b", "b c"])
    # neither [a, bcd] nor [ab, cd] arises: b and c are merged first, then nothing joins a, bc, d
    assert check_merges(numbered("bc", "ab", "cd", "abcd"), ["b c", "a b", "c d", "ab cd"]) == {
        "abcd"
    }
    # of three equal letters the first two are merged
    assert not check_merges(numbered("aa", "aaa"), ["a a", "aa a"])
    with pytest.raises(ValueError, match=r"the merge \['aa', 'a'\] is not listed"):
        check_merges(numbered("aa", "aaa"), ["a a", "a aa"])
    assert not check_merges(numbered("aa", "aaaa"), ["a a", "aa aa"])


def test_the_check_of_merges_is_sharp() -> None:
    """On random lists of merges: what is accepted merges all short texts alike, nothing else."""
    texts = ["".join(letters) for n in range(2, 9) for letters in itertools.product("ab", repeat=n)]
    rng, verdicts = random.Random(5), set[bool]()
    for _ in range(60):
        tokens, merges = ["a", "b"], list[tuple[str, str]]()
        for _ in range(6):
            left, right = rng.choice(tokens), rng.choice(tokens)
            if left + right not in tokens and len(left + right) < 6:
                tokens.append(left + right)
                merges.append((left, right))
        numbers = {token: number for number, token in enumerate(tokens)}
        listed = {pair: number for number, pair in enumerate(merges)}
        try:
            unreachable = check_merges(numbers, merges)
        except ValueError:
            unreachable = None
        any_pair = {
            (token[:size], token[size:]): number
            for token, number in numbers.items()
            for size in range(1, len(token))
            if token not in (unreachable or ())
        }
        same = all(merged(text, listed) == merged(text, any_pair) for text in texts)
        assert same == (unreachable is not None)
        verdicts.add(same)
    assert verdicts == {True, False}


def merged(text: str, order: dict[tuple[str, str], int]) -> list[str]:
    parts = list(text)
    while True:
        found = [(order[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in order]
        if not found:
            return parts
        first = min(found)[1]
        parts[first : first + 2] = [parts[first] + parts[first + 1]]


# --- copies ---------------------------------------------------------------------------------------


def test_a_tokenizer_is_copied_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<|im_end|>"
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    source, target = tmp_path / "source", tmp_path / "target"
    plain = load(source, found_of("qwen"), tokenizer_config=config, config={"hidden_size": 3})
    (source / "chat_template.jinja").write_text(template)
    target.mkdir()
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert copy_tokenizer_files(source, target) == names
    assert sorted(path.name for path in target.iterdir()) == sorted(names)
    assert copy_tokenizer_files(source / "tokenizer.json", source) == names  # onto itself
    other = load_tokenizer(str(target))
    assert other.encode("the 12 <think>") == plain.encode("the 12 <think>")
    ranks = bpe.write_ranks(source / "own.tiktoken", [])
    assert copy_tokenizer_files(ranks, target) == ["own.tiktoken"]
    folder = bpe.write_gpt2(tmp_path / "gpt2", [])
    assert copy_tokenizer_files(folder, target) == ["vocab.bpe", "encoder.json"]

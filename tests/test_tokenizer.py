from collections.abc import Callable
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.model.chess_tokens import chess_ranks
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.vocabulary import GPT2_PATTERN
from minigrpo.tasks.chess_env import ChessEnv

from . import bpe


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_tokenizer("chess")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_shipped_ranks_are_those_that_the_module_writes() -> None:
    tokenizer = load_tokenizer("chess")
    assert all(tokenizer.tokens[rank] == token for token, rank in chess_ranks().items())
    assert tokenizer.n_vocab == len(chess_ranks()) + 1
    assert tokenizer.eot == tokenizer.n_vocab - 1


def test_fixed_forms_are_single_tokens() -> None:
    tokenizer = load_tokenizer("chess")

    def split(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert split("A: 8/2b1k3 w Kq e3 0 12+e7e8q+") == [
        *["A: ", *"8/2b1k3", " w", " Kq", " e3", " ", "0", " ", "1", "2", "+", "e7", "e8", "q", "+"]
    ]
    assert split("8/2b1k3 b - - 0 1+0.001+0+0")[-4:] == ["0", " ", "1", "+0.001+0+0"]
    env = ChessEnv(0)
    for i in range(200):
        assert tokenizer.encode(env.train(i).answer)[-1] >= 256  # the ending is one token


def test_end_of_text_written_out_is_plain_text() -> None:
    tokenizer = load_tokenizer("chess")
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == "<|endoftext|>"


def test_the_end_of_text_is_not_part_of_the_text() -> None:
    tokenizer = load_tokenizer("chess")
    ids = [*tokenizer.encode("e2e4"), tokenizer.eot]
    assert tokenizer.decode(ids) == "e2e4"
    assert tokenizer.decode(ids, show_stops=True) == "e2e4<|endoftext|>"
    assert tokenizer.stops == {tokenizer.eot} and tokenizer.prefix == ()
    assert tokenizer.turn_end == tokenizer.eot and tokenizer.chat is None
    assert tokenizer.encode_batch(["e2e4", ""]) == [tokenizer.encode("e2e4"), []]
    with pytest.raises(KeyError):
        tokenizer.decode([tokenizer.n_vocab])


def test_if_gpt2_cannot_be_fetched_one_line_says_how_to_provide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match="--tokenizer gpt2: .*TIKTOKEN_CACHE_DIR") as error:
        load_tokenizer("gpt2")
    assert "\n" not in str(error.value)


# --- ranks by path --------------------------------------------------------------------------------

TEXTS = [
    "A: 8/2b1k3 w Kq e3 0 12+e7e8q+",
    "it's  a test,\n\n 12 x\t",
    "Ελλάδα 象棋 \U0001f600",
    "<|endoftext|>",
    " ",
    "",
]
HUGGING_FACE = ("merges.txt", "vocab.json")


def test_every_way_to_give_ranks_is_the_same_tokenizer(tmp_path: Path) -> None:
    merges = bpe.chess_merges()
    first, second = (
        bpe.write_gpt2(tmp_path / "a", merges),
        bpe.write_gpt2(tmp_path / "b", merges, HUGGING_FACE),
    )
    paths = [
        first,
        first / "vocab.bpe",
        first / "encoder.json",
        second,
        second / "merges.txt",
        second / "vocab.json",
    ]
    plain = load_tokenizer(str(bpe.write_ranks(tmp_path / "ranks.tiktoken", merges)))
    assert plain.n_vocab == 256 + 60 + 1 and plain.eot == plain.n_vocab - 1
    for path in paths:
        other = load_tokenizer(str(path))
        assert (other.n_vocab, other.eot) == (plain.n_vocab, plain.eot)
        for text in TEXTS:
            tokens = [plain.tokens[token] for token in plain.encode(text)]
            assert [other.tokens[token] for token in other.encode(text)] == tokens
            assert other.decode(other.encode(text)) == text
    assert len(plain.encode(TEXTS[0])) < len(TEXTS[0])


@given(st.text(max_size=30))
def test_the_pattern_cuts_as_tiktokens_own_gpt2_does(text: str) -> None:
    # tiktoken has the pattern without a network; only the ranks are fetched
    import tiktoken_ext.openai_public as published

    assert regex.findall(GPT2_PATTERN, text) == regex.findall(published.r50k_pat_str, text)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.tiktoken", None, "must be auto, chess, gpt2 or a path; there is no "),
        ("x.tiktoken", "IQ== 0\nhello\n", "line 2 is not a token in base 64 and its rank"),
        ("x.tiktoken", "IQ== 0\n", "has no token for 255 of the 256 bytes, the first is 0"),
        ("x.tiktoken", "", "has no token for 256 of the 256 bytes"),
        (
            "vocab.bpe",
            "#version: 0.2\n",
            "must be auto, chess, gpt2 or a path; there is no .*encoder.json",
        ),
        ("folder", None, "must be auto, chess, gpt2 or a path"),
    ],
)
def test_a_path_without_ranks_is_one_line(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"--tokenizer {path}: {words}") as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "merges.txt",
            lambda text: text[: len(text) // 2],
            "does not number 256 bytes, the .* merges in their order",
        ),
        ("merges.txt", lambda text: text.replace("\n", "\nx y\n", 1), "does not number 256 bytes"),
        ("vocab.json", lambda text: text[: len(text) // 2], "the vocabulary is not whole JSON"),
        ("vocab.json", lambda text: "[1, 2]", "not a JSON object of tokens and their numbers"),
        ("vocab.json", lambda text: text.replace('"!"', '"象"'), "'象' does not stand for a byte"),
    ],
)
def test_damaged_merges_and_vocabulary_are_one_line(
    tmp_path: Path, file: str, change: Callable[[str], str], words: str
) -> None:
    folder = bpe.write_gpt2(tmp_path, bpe.chess_merges(10), HUGGING_FACE)
    (folder / file).write_text(change((folder / file).read_text()))
    with pytest.raises(ValueError, match=words) as error:
        load_tokenizer(str(folder))
    assert str(error.value).startswith(f"--tokenizer {folder}: ") and "\n" not in str(error.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ValueError, match="neither tokenizer.json nor vocab.bpe and encoder.json nor merges.txt"
    ):
        load_tokenizer(str(empty))


@pytest.mark.peer
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    folder = bpe.write_gpt2(tmp_path, bpe.chess_merges(), HUGGING_FACE)
    theirs = transformers.GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    ours, env = load_tokenizer(str(folder)), ChessEnv(1)
    texts = [example.prompt + example.answer for example in map(env.held_out, range(50))] + TEXTS[
        :3
    ]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eot == theirs.eos_token_id

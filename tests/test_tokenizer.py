import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tokenizer import chess_ranks, load_tokenizer


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_tokenizer("chess")
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_the_shipped_ranks_are_the_ones_that_the_module_describes() -> None:
    tokenizer = load_tokenizer("chess")
    assert all(tokenizer.decode_single_token_bytes(rank) == token for token, rank in chess_ranks().items())
    assert tokenizer.n_vocab == len(chess_ranks()) + 1
    assert tokenizer.eot_token == tokenizer.n_vocab - 1


def test_prompt_and_answer_are_split_where_their_form_says() -> None:
    tokenizer = load_tokenizer("chess")

    def split(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode_ordinary(text)]

    assert split("A: 8/2b1k3 w Kq e3 0 12+e7e8q+") == [
        *["A: ", *"8/2b1k3", " w", " Kq", " e3", " ", "0", " ", "1", "2", "+", "e7", "e8", "q", "+"]
    ]
    assert split("8/2b1k3 b - - 0 1+0.001+0+0")[-4:] == ["0", " ", "1", "+0.001+0+0"]
    env = ChessEnv(0)
    for i in range(200):
        assert tokenizer.encode_ordinary(env.train(i).answer)[-1] >= 256  # the ending is one token


def test_end_of_text_written_out_is_plain_text() -> None:
    tokenizer = load_tokenizer("chess")
    assert tokenizer.eot_token not in tokenizer.encode_ordinary("<|endoftext|>")


def test_where_gpt2_cannot_be_fetched_one_line_says_how_to_provide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match="--tokenizer gpt2: .*TIKTOKEN_CACHE_DIR") as error:
        load_tokenizer("gpt2")
    assert "\n" not in str(error.value)

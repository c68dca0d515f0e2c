import chess
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.rewards import RewardScorer, is_valid_fen, similarity
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.types import Example

ENV = ChessEnv(0)
EXAMPLES = [ENV.train(i) for i in range(64)]
HOSTILE = ["", "+", "+++", "\0" * 50, "\ud800", "٠+0.0+0+0", "NaN+nan+0+0", "a" * 10**6, "+" * 10**6, " " * 10**5, "9" * 5000]


@pytest.mark.parametrize("fen", [chess.STARTING_FEN, "4k3/8/8/8/8/8/8/4K3 w - - 0 1", "4k3/8/8/8/8/8/8/R3K3 w Q - 12 2034"])
def test_valid_fens(fen: str) -> None:
    assert is_valid_fen(fen)


@pytest.mark.parametrize(
    "fen",
    [
        None,
        7,
        "",
        "4k3/8/8/8/8/8/8/4K3",  # python-chess fills in the rest
        "4k3/8/8/8/8/8/8/4K3 w Q - 0 1",  # a right without a rook, which python-chess calls valid
        "4k3/8/8/8/8/8/8/4K3  w - - 0 1",
        "4k3/8/8/8/8/8/8/4K3 w - - 0 1 ",
        "4k3/8/8/8/8/8/8/4K3 w - - +0 1",
        "4k3/8/8/8/8/8/8/4K3 w - - 0 007",
        "4k3/8/8/8/8/8/8/4K3 w - - 0 1_0",
        "4k3/8/8/8/8/8/8/4K3 w - - 0 ١",
        "4k3/8/8/8/8/8/8/4K3 w - - 0 10000",
        "4k3/8/8/8/8/8/8/4K3 w - e3 0 1",
        "4k3/8/8/8/8/8/8/8 w - - 0 1",  # no white king
        "4k3/8/8/8/8/8/8/3KK3 w - - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w QKkq - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w HAha - 0 1",
        "4k3/44/8/8/8/8/8/4K3 w - - 0 1",
    ],
)
def test_invalid_fens(fen: object) -> None:
    assert not is_valid_fen(fen)


@given(st.sampled_from(EXAMPLES), st.integers(0, 60), st.characters())
def test_a_valid_fen_is_what_python_chess_accepts_and_writes_back(example: Example, place: int, character: str) -> None:
    fen = example.answer.split("+")[0]
    mutant = fen[:place] + character + fen[place + 1 :]
    try:
        board = chess.Board(mutant)
        expected = board.status() == chess.STATUS_VALID and board.fen(en_passant="fen") == mutant
    except ValueError:
        expected = False
    assert is_valid_fen(mutant) == expected


def test_is_valid_fen_agrees_with_its_contract_on_40000_mutants() -> None:
    """One to three characters replaced, inserted or removed; what python-chess calls valid is not enough."""
    rng = np.random.default_rng(0)
    alphabet = "KQRBNPkqrbnp12345678/ -wabcdefgh0+9_٣"
    verdicts = {True: 0, False: 0}
    for _ in range(40_000):
        text = list(EXAMPLES[rng.integers(len(EXAMPLES))].answer.split("+")[0])
        for _ in range(rng.integers(1, 4)):
            place, kind = rng.integers(len(text)), rng.integers(3)
            text[place : place + (kind != 1)] = [alphabet[rng.integers(len(alphabet))]] if kind < 2 else []
        mutant = "".join(text)
        try:
            board = chess.Board(mutant)
            expected = board.status() == chess.STATUS_VALID and board.fen(en_passant="fen") == mutant and mutant.isascii()
        except ValueError:
            expected = False
        assert is_valid_fen(mutant) == expected, mutant
        verdicts[expected] += 1
    assert min(verdicts.values()) > 500


def test_similarity() -> None:
    assert similarity("", "") == 1
    assert similarity("abcd", "abcd") == 1
    assert similarity("abcd", "abxd") == 0.75
    assert similarity("", "ab") == 0


@given(st.text(max_size=30), st.text(max_size=30), st.integers(0, 30), st.characters())
def test_moving_away_from_the_truth_never_raises_similarity(truth: str, prefix: str, place: int, other: str) -> None:
    """Replacing a character that is right by one that stands nowhere in the truth."""
    if place < len(truth) and other not in truth:
        assert similarity(truth[:place] + other + truth[place + 1 :], truth) < 1
        assert similarity(prefix + other, truth) <= similarity(prefix, truth) + 1e-12 or len(prefix) < len(truth)


def test_parts_tell_what_is_wrong() -> None:
    example = next(e for e in EXAMPLES if e.kind == "quiet")
    fen = example.answer.split("+")[0]
    assert ENV.score(example, f"{fen}+1.0+1+0") == {
        "format": 1.0, "valid": 1.0, "similarity": 1.0, "exact_fen": 1.0, "reward_value": 0.0, "flags": 0.5
    }  # fmt: skip
    wrong = chess.STARTING_FEN
    parts = ENV.score(example, f"{wrong}+0.001+0+0")
    assert parts["valid"] == 1 and parts["exact_fen"] == 0 and 0 < parts["similarity"] < 1
    assert ENV.score(example, fen)["format"] == 0
    assert ENV.score(example, fen)["exact_fen"] == 1


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_hostile_text_is_scored_like_any_other(text: str) -> None:
    parts = ENV.score(EXAMPLES[0], text)
    assert all(0 <= value <= 1 for value in parts.values())
    assert parts["exact_fen"] == 0


@given(st.sampled_from(EXAMPLES), st.text())
def test_any_text_scores_between_0_and_1(example: Example, text: str) -> None:
    assert all(0 <= value <= 1 for value in ENV.score(example, text).values())


def mutants(n: int) -> list[list[str]]:
    rng = np.random.default_rng(0)
    texts = []
    for example in EXAMPLES:
        group = []
        for _ in range(n):
            text = list(example.answer)
            for _ in range(rng.integers(0, 3)):
                text[rng.integers(len(text))] = "KQRBNPkqrbnp12345678/ +w-"[rng.integers(25)]
            group.append("".join(text))
        texts.append(group)
    return texts


def test_the_pool_equals_serial_bit_for_bit_and_keeps_the_order() -> None:
    texts = mutants(16)
    serial, pool = RewardScorer(ENV), RewardScorer(ENV, workers=3)
    a, b = serial.score(EXAMPLES, texts), pool.score(EXAMPLES, texts)
    pool.close()
    assert np.array_equal(a.total, b.total)
    for name in ENV.parts:
        assert np.array_equal(a.parts[name], b.parts[name])
    for p, g in [(0, 0), (17, 3), (63, 15)]:
        parts = ENV.score(EXAMPLES[p], texts[p][g])
        assert a.total[p, g] == pytest.approx(sum(weight * parts[name] for name, weight in ENV.parts.items()))


def test_each_distinct_text_of_a_prompt_is_scored_once() -> None:
    class Counting(ChessEnv):
        calls = 0

        def score(self, example, text):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().score(example, text)

    env = Counting(0)
    RewardScorer(env).score(EXAMPLES[:2], [["a", "a", "b"], ["a", "c", "c"]])
    assert env.calls == 4


def test_weights_choose_and_scale_the_parts() -> None:
    texts = mutants(4)
    table = RewardScorer(ENV, weights={"valid": 2.0}).score(EXAMPLES, texts)
    assert np.array_equal(table.total, 2 * table.parts["valid"])
    with pytest.raises(ValueError, match="--reward-weights: no part typo; allowed: exact_fen"):
        RewardScorer(ENV, weights={"typo": 1.0})

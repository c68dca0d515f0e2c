from collections import Counter

import chess
import pytest

from minigrpo.rewards import is_valid_fen
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.self_play import KINDS, PLIES_PER_GAME, Positions
from minigrpo.tasks.splits import is_held_out, is_held_out_prompt
from minigrpo.tasks.transitions import transition

START = chess.STARTING_FEN


@pytest.mark.parametrize(
    ("fen", "move", "answer"),
    [
        (START, "e2e4", "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1+0.001+0+0"),
        (START, "e2e5", f"{START}+0.0+0+1"),
        (
            "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2",
            "d8h4",
            "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3+1.0+1+0",
        ),
        ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "f1f7", "7k/5Q2/6K1/8/8/8/8/8 b - - 1 1+0.5+1+0"),
        ("8/8/8/8/8/k7/p7/K7 b - - 0 1", "a3b3", "8/8/8/8/8/1k6/p7/K7 w - - 1 2+0.5+1+0"),
        ("8/8/8/8/8/1k6/p7/K7 b - - 149 99", "b3c3", "8/8/8/8/8/2k5/p7/K7 w - - 150 100+0.5+1+0"),
        (
            "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 3 9",
            "e1g1",
            "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 4 9+0.001+0+0",
        ),
        ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6", "4k3/8/3P4/8/8/8/8/4K3 b - - 0 2+0.001+0+0"),
        ("4k3/P7/8/8/8/8/8/4K3 w - - 0 2", "a7a8q", "Q3k3/8/8/8/8/8/8/4K3 b - - 0 2+0.001+0+0"),
    ],
    ids=[
        "quiet",
        "illegal",
        "mate",
        "stalemate",
        "stalemate-black",
        "75 moves",
        "castling",
        "en passant",
        "promotion",
    ],
)
def test_transition(fen: str, move: str, answer: str) -> None:
    assert transition(fen, move) == answer


def test_an_example_is_a_pure_function_of_seed_and_index() -> None:
    one, other = Positions(3, "train"), Positions(3, "train")
    forwards = [one.example(i) for i in range(40)]
    Positions.game.cache_clear()
    backwards = [other.example(i) for i in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert [example.index for example in forwards] == list(range(40))
    assert forwards != [Positions(4, "train").example(i) for i in range(40)]


def test_draws_mix_games_never_repeat_and_need_one_new_game_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = Positions(0, "train")
    monkeypatch.setattr(Positions, "example", lambda self, index: index)
    draws = [[positions.draw(16 * turn + i) for i in range(PLIES_PER_GAME)] for turn in range(200)]
    assert len({index for turn in draws for index in turn}) == 200 * PLIES_PER_GAME
    games = [{index // PLIES_PER_GAME for index in turn} for turn in draws]
    assert all(len(turn) == PLIES_PER_GAME for turn in games)
    seen = set().union(*games[:100])
    for turn in games[100:]:
        assert len(turn - seen) == 1
        seen |= turn
    # apart from the start, every example is drawn
    assert {index for turn in draws for index in turn} >= set(range(60 * 16, 200 * 16))


def test_evaluation_never_sees_a_position_that_training_can() -> None:
    env = ChessEnv(0)
    trained = {" ".join(env.train(i).prompt.split(" ")[1:5]) for i in range(600)}
    held_out = {" ".join(env.held_out(i).prompt.split(" ")[1:5]) for i in range(300)}
    assert not trained & held_out
    assert all(is_held_out(position) for position in held_out)
    assert not any(is_held_out(position) for position in trained)


def test_the_clocks_do_not_decide_the_split() -> None:
    assert is_held_out(START) == is_held_out(START.replace("0 1", "7 31"))


def test_the_split_never_changes() -> None:
    """With another hash, models that exist would be evaluated on positions they were trained on."""
    fens = [
        "rnbqkbnr/pppp1ppp/4p3/8/8/1P1P4/P1P1PPPP/RNBQKBNR b KQkq - 0 2",
        "1nb1k1r1/2r2ppp/q1pbp3/p2p2P1/3P1P1B/P1P2N2/R3P2P/QN2KB1R w K - 5 20",
        "6B1/6k1/2N1Q3/7p/4p3/1ppp1b2/8/1K6 w - - 2 67",
        "2r1qb1r/2pkppp1/7n/pp3P1p/5N1P/PP1P1B1P/2PP1K2/R1BQ2NR w - - 5 18",
        "8/5k2/1B2b3/5p2/2P2N1K/P1b1P1r1/7P/8 b - - 4 52",
        "2r5/2k1pp2/pp6/2p4p/1P4bp/3P2P1/PB2BP1R/RN2K3 w Q - 1 24",
    ]
    assert [is_held_out(fen) for fen in fens] == [False, False, False, True, True, True]
    held_out = [n for n in range(60) if is_held_out_prompt(f"{n}+{n}=")]
    assert held_out == [5, 6, 12, 17, 25, 47, 52, 57]


def test_examples_are_true_legal_and_of_the_kind_they_say() -> None:
    env = ChessEnv(1)
    examples = [env.train(i) for i in range(1500)]
    kinds = Counter(example.kind for example in examples)
    assert set(kinds) <= set(KINDS)
    assert all(kinds[kind] >= 3 for kind in KINDS)
    assert 0.02 < kinds["illegal"] / len(examples) < 0.09
    for example in examples:
        fen, move, _ = example.prompt.removeprefix("A: ").split("+")
        board = chess.Board(fen)
        assert is_valid_fen(fen)
        assert board.is_legal(chess.Move.from_uci(move)) == (example.kind != "illegal")
        assert example.answer == transition(fen, move)
        assert env.score(example, example.answer) == dict.fromkeys(env.parts, 1.0)


def test_history_tells_the_last_moves() -> None:
    plain, told = Positions(0, "train"), Positions(0, "train", history=3)
    for i in range(50):
        prompt = told.example(i).prompt
        assert prompt.startswith(plain.example(i).prompt)
        moves = prompt.removeprefix(plain.example(i).prompt).removesuffix("+").split(",")
        assert len(moves) <= 3
        assert told.example(i).answer == plain.example(i).answer

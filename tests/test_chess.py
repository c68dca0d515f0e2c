"""The chess tasks: self-play, files of games and of lines, and scores against the truth."""

import gzip
from collections import Counter
from pathlib import Path

import chess
import pytest

from minigrpo.fen import is_valid_fen, transition
from minigrpo.tasks.chess_env import PICK_BIAS, ChessEnv, position_is_held_out
from minigrpo.tasks.loading import load_task
from minigrpo.types import Example

from .tiny import GOLDEN, ROOT

START = chess.STARTING_FEN
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq"


def parts_of(example: Example) -> tuple[str, str]:
    fen, move, *_ = example.prompt.removeprefix("A: ").split("+")
    return fen, move


def test_examples_are_true_legal_and_in_their_split() -> None:
    env = ChessEnv(1)
    train = [env.train(i) for i in range(300)]
    kinds = Counter(example.kind for example in train)
    assert set(kinds) == {*PICK_BIAS, "quiet", "capture", "illegal"}
    assert 0.02 < kinds["illegal"] / len(train) < 0.09
    for example in train:
        fen, move = parts_of(example)
        assert is_valid_fen(fen)
        assert not position_is_held_out(fen)
        assert chess.Board(fen).is_legal(chess.Move.from_uci(move)) == (example.kind != "illegal")
        assert (example.answer, example.kind) == transition(fen, move)
        assert set(env.score(example, example.answer).values()) == {1.0}
    for number in range(40):
        assert position_is_held_out(parts_of(env.held_out(number))[0])
    later = START.replace("0 1", "7 31")  # clocks do not matter
    assert position_is_held_out(START) == position_is_held_out(later)


QUIET = Example(f"A: {START}+e2e4+", f"{AFTER_E4} e3 0 1+0.001+0+0")
NAMES = ("exact_fen", "valid", "format", "reward_value", "flags")
SCORES = [
    (QUIET.answer, (1, 1, 1, 1, 1)),
    (f"{AFTER_E4} e3 0 1+0.001+1+0", (1, 1, 1, 1, 0.5)),
    (f"{AFTER_E4} e3 0 1+0.5+1+1", (1, 1, 1, 0, 0)),
    (f"{AFTER_E4} e3 0 1", (1, 1, 0, 0, 0)),
    (f"{AFTER_E4} - 0 1+-1.0+0+0", (0, 1, 1, 0, 1)),
    (f"{AFTER_E4} e3 0 1+0.001+0+0+0", (1, 1, 0, 0, 0)),
    (f"{AFTER_E4} e4 0 1+0.001+0+0\n", (0, 0, 0, 0, 0)),
    (QUIET.answer + "0" * 200, (1, 1, 0, 0, 0)),
    ("", (0, 0, 0, 0, 0)),
]


@pytest.mark.parametrize(("text", "expected"), SCORES)
def test_a_successor_is_scored_by_its_parts(text: str, expected: tuple[float, ...]) -> None:
    scores = dict(ChessEnv(0).score(QUIET, text))
    is_exact = scores.pop("similarity") == 1
    assert is_exact == expected[0]
    assert scores == dict(zip(NAMES, expected, strict=True))


GOOD_GAMES = [  # where they begin, and their moves
    (START, "e4 e5 Nf3 Nc6 Bc4 Nf6 Ng5 d5 exd5 Na5 O-O Bd6 Qh5 O-O Qxf7+ Rxf7 d4 e4 f4 exf3"),
    (START, "f3 e5 g4 Qh4#"),
    ("4k3/P6p/8/8/8/8/8/4K3 w - - 3 40", "a8=Q+ Kd7 Qb7+ Ke6"),
    (START, "e4 e5 Nf3"),
]


def test_every_ply_of_a_good_game_is_a_question_and_bad_games_are_skipped(tmp_path: Path) -> None:
    """The file has four good games, and four that are none."""
    games = tmp_path / "games.pgn.gz"
    games.write_bytes(gzip.compress((GOLDEN / "games.pgn").read_bytes()))
    plies = Counter()
    for fen, moves in GOOD_GAMES:
        board = chess.Board(fen)
        for san in moves.split():
            before = board.fen(en_passant="fen")
            plies[before, board.push_san(san).uci()] += 1
    played = {ply: n for ply, n in plies.items() if not position_is_held_out(ply[0])}
    task = load_task(str(ROOT / "examples" / "chess_games.py"), seed=0, data=str(games))
    rows = task.source
    train = [task.train(i) for i in range(rows.num_train)]
    held_out = [task.held_out(i) for i in range(task.num_held_out or 0)]
    assert Counter(map(parts_of, train)) == played  # as often as it was played
    asked = [parts_of(example)[0] for example in held_out]
    assert sorted(asked) == sorted({fen for fen, _ in plies.keys() - played})  # once
    for example in [*train, *held_out]:
        assert (example.answer, example.kind) == transition(*parts_of(example))
    assert len(rows.skipped) == 4


def advised(fen: str, evaluations: str) -> str:
    """A line of best_move.py's data: as many legal moves as evaluations, the first one the best."""
    moves = [move.uci() for move in chess.Board(fen).legal_moves][: len(evaluations.split())]
    return f"P: {fen} M: {' '.join(moves)} E: {evaluations} B: {moves[0]}"


BEST_SCORES = {
    " M: g1f3 e2e4 d2d4 E: 20 0.4 0.3 B: e2e4": (1, 1, 1, 1, 1),  # in any order
    " M: e2e4 e2e4 e2e4 e2e4 E: 0.4 0.4 0.4 0.4 B: e2e4": (1, 1 / 4, 1 / 4, 2 / 5, 1),
    " M: e2e4 d2d4 a1a8 E: 1.4 B: e2e5": (0, 2 / 3, 1 / 6, 2 / 4, 0),
    "M: ١e4 \ud800": (0, 0, 0, 0, 0),
}


def test_best_move_reads_its_lines_and_scores_each_part(tmp_path: Path) -> None:
    path = tmp_path / "advised.txt"
    fens = {parts_of(example)[0] for example in map(ChessEnv(0).train, range(40))}
    lines = [advised(fen, "0.26 0.25") for fen in sorted(fens)]
    path.write_text("".join(f"{line}\n" for line in lines))
    task = load_task(str(ROOT / "examples" / "best_move.py"), seed=0, data=str(path))
    assert task.source.num_train + task.num_held_out == len(fens)
    for example in (task.train(0), task.held_out(0)):
        assert set(task.score(example, example.answer).values()) == {1.0}
        assert f"{example.prompt}{example.answer}" in lines
    best = Example(f"P: {START}", " M: e2e4 d2d4 g1f3 E: 0.4 0.3 999.98 B: e2e4")
    for text, expected in BEST_SCORES.items():
        assert tuple(task.score(best, text).values()) == pytest.approx(expected), text

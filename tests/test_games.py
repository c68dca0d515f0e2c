"""PGN files: a small one that covers every case, and games played by a real engine."""

import gzip
import io
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import chess
import chess.engine
import chess.pgn
import pytest

from minigrpo import Config, Trainer
from minigrpo.rewards import RewardScorer
from minigrpo.tasks.games import Games
from minigrpo.tasks.registry import load_task
from minigrpo.tasks.self_play import KINDS
from minigrpo.tasks.splits import is_held_out
from minigrpo.tasks.transitions import render, transition
from minigrpo.tools.annotate import find_engine
from minigrpo.types import Example

from .gradients import TINY

SMALL = Path(__file__).parent / "data" / "small.pgn"


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.done: list[int] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def reading(self, name: str, total: int) -> Any:
        return nullcontext(self.done.append)


def everything(games: Games) -> list[Example]:
    """One epoch of training examples, then all held-out ones."""
    return [ask(i) for ask, number in _splits(games) for i in range(number)]


def plies(text: str) -> Counter[tuple[str, str]]:
    """How often each (FEN, move) occurs in the main lines, by python-chess's own game builder."""
    found: Counter[tuple[str, str]] = Counter()
    handle = io.StringIO(text)
    while (game := chess.pgn.read_game(handle)) is not None:
        board = game.board()
        for move in game.mainline_moves():
            found[render(board), move.uci()] += 1
            board.push(move)
    return found


def asked(example: Example) -> tuple[str, str]:
    fen, move, *_ = example.prompt.removeprefix("A: ").split("+")
    return fen, move


def assert_every_ply(games: Games, played: Counter[tuple[str, str]]) -> None:
    """Training has each ply as often as it was played; evaluation has each position, whatever its
    clocks, and move once.
    """
    train, held_out = ([asked(ask(i)) for i in range(n)] for ask, n in _splits(games))
    assert Counter(train) == {
        ply: number for ply, number in played.items() if not is_held_out(ply[0])
    }
    assert set(held_out) <= set(played)
    questions = [(*fen.split(" ")[:4], move) for fen, move in held_out]
    assert Counter(questions) == Counter(
        {(*fen.split(" ")[:4], move): 1 for fen, move in played if is_held_out(fen)}
    )


def _splits(games: Games) -> list[tuple[Callable[[int], Example], int]]:
    return [(games.train, games.num_train), (games.held_out, games.num_held_out)]


def test_a_small_file_with_everything_that_may_occur() -> None:
    heard = Heard()
    games = Games(SMALL, seed=0, listener=heard)
    assert heard.warnings == [
        f"{SMALL}: skipped 5 of 11 games: game 4 (illegal san: 'Ke3' in "
        "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w "
        "KQkq - 0 2), game 6 (a null move at ply 2), game 7 (starts from an impossible position: "
        "8/8/8/8/8/8/8/K7 w - - 0 1), ..."
    ]
    assert heard.done[-1] == SMALL.stat().st_size
    whole = ("comments", "mate", "broken", "from", "and", "the last")
    good = [
        game
        for game in SMALL.read_text(encoding="utf-8").split("[Event ")
        if game[1:].startswith(whole)
    ]
    examples = everything(games)
    assert_every_ply(games, plies("[Event ".join(["", *good])))
    assert len(examples) == 20 + 4 + 3 + 4 + 5 - 1  # 2. Nf3 is held out, and played twice
    kinds = Counter(example.kind for example in examples)
    assert (
        kinds["checkmate"] == kinds["en passant"] == 1
        and kinds["castling"] == 3
        and kinds["check"] == 3
    )
    assert set(kinds) <= set(KINDS)


def test_answers_are_true_and_positions_stay_in_their_split() -> None:
    games = Games(SMALL, seed=0)
    task = load_task("chess-env", seed=0, data=str(SMALL))
    for split, number in (("train", games.num_train), ("held_out", games.num_held_out)):
        for i in range(number):
            example = getattr(games, split)(i)
            fen, move = asked(example)
            assert is_held_out(fen) == (split == "held_out")
            assert example.answer == transition(fen, move)
            assert task.score(example, example.answer) == dict.fromkeys(task.parts, 1.0)
            assert getattr(task, split)(i) == example


def test_history_has_the_moves_of_the_game() -> None:
    told = {
        asked(example): example.prompt.split("+")[2]
        for example in everything(Games(SMALL, seed=0, history=3))
    }
    assert told[chess.STARTING_FEN, "f2f3"] == ""
    assert (
        told["rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq g3 0 2", "d8h4"]
        == "f2f3,e7e5,g2g4"
    )
    # this game starts from a position of its own, so one move is all there is
    assert told["Q3k3/7p/8/8/8/8/8/4K3 b - - 0 40", "e8d7"] == "a7a8q"


def test_an_example_is_a_pure_function_of_file_seed_and_number(tmp_path: Path) -> None:
    packed = tmp_path / "small.pgn.gz"
    packed.write_bytes(gzip.compress(SMALL.read_bytes()))
    plain, other = Games(SMALL, seed=3), Games(packed, seed=3)
    numbers = [5, 0, 90, 17, 5]
    assert [plain.train(i) for i in numbers] == [other.train(i) for i in numbers]
    assert [plain.held_out(i) for i in numbers] == [other.held_out(i) for i in numbers]
    n = plain.num_train
    epochs = [[asked(plain.train(epoch * n + i)) for i in range(n)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert epochs[0] != [asked(Games(SMALL, seed=4).train(i)) for i in range(n)]
    assert plain.train(n + 1).index == n + 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.pgn", None, "none.pgn: cannot be read .No such file"),
        ("empty.pgn", b"", "empty.pgn: 0 usable examples for training and 0 for"),
        (
            "one.pgn",
            b"1. e4",
            "one.pgn: [01] usable examples for training and [01] for evaluation; .* one position "
            "in 4",
        ),
        (
            "noise.pgn",
            bytes(range(256)) * 40,
            "noise.pgn: 0 usable examples for training and 0 for",
        ),
        ("not.pgn.gz", b"1. e4", "not.pgn.gz: cannot be read .Not a gzipped file"),
        (
            "cut.pgn.gz",
            gzip.compress(SMALL.read_bytes())[:-300],
            "cut.pgn.gz: cannot be read .Compressed file ended",
        ),
        ("games.doc", b"1. e4", "must end with .pgn, .pgn.gz, .txt, .jsonl, got .*games.doc"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        load_task("chess-env", seed=0, data=str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_run_on_games_says_what_it_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {
        **TINY,
        "max_steps": 1,
        "eval_every": 0,
        "history": 2,
        "out_dir": str(tmp_path / "run"),
    }
    summary = Trainer(Config.of(**options, data=str(SMALL)), quiet=True).fit()
    assert summary["last_evaluation"]["n"] == 8
    assert capfd.readouterr().err.count("skipped 5 of 11 games") == 1


# --- real games -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """80 games of an engine against itself, some broken off, annotated as servers and people do,
    and 2 damaged games more. Returns the file, and the text of the good games.
    """
    path, rng, good = tmp_path_factory.mktemp("games") / "played.pgn", random.Random(0), []
    with chess.engine.SimpleEngine.popen_uci(find_engine()) as engine, open(path, "w") as file:
        for number in range(80):
            game = chess.pgn.Game({"Event": f"game {number}", "Result": "*"})
            node: chess.pgn.GameNode = game
            board, length = chess.Board(), 12 if number % 10 == 0 else 70
            while not board.is_game_over(claim_draw=True) and board.ply() < length:
                moves = list(board.legal_moves)
                move = rng.choice(moves)
                if board.ply() > 5:
                    move = (
                        engine.play(board, chess.engine.Limit(nodes=30), game=number).move or move
                    )
                if number % 3 == 0 and rng.random() < 0.2:
                    node.add_variation(rng.choice(moves), comment="instead {1. e4")
                node = (
                    node.add_main_variation(move) if not node.variations else _promoted(node, move)
                )
                if number % 2 == 0:
                    node.set_clock(600 - board.ply())
                if number % 5 == 0:
                    node.comment += " a comment\n[Event that is none"
                    node.nags.add(chess.pgn.NAG_GOOD_MOVE)
                board.push(move)
            game.headers["Result"] = board.result(claim_draw=True)
            text = f"{game}\n\n"
            good.append(text)
            file.write(text)
            if number in (20, 50):
                file.write(text.replace(" 4. ", " 4. Kxh8 ", 1))
    return path, "".join(good)


def _promoted(node: chess.pgn.GameNode, move: chess.Move) -> chess.pgn.ChildNode:
    """Make a move the main line of a node that already has other moves."""
    if not node.has_variation(move):
        node.add_variation(move)
    node.promote_to_main(move)
    return node.variation(move)


@pytest.mark.engine
@pytest.mark.slow
def test_every_ply_of_real_games_is_an_example(played: tuple[Path, str]) -> None:
    path, good = played
    heard = Heard()
    games = Games(path, seed=1, history=4, listener=heard)
    assert (
        len(heard.warnings) == 1
        and "skipped 2 of 82 games: game 22 (illegal san: 'Kxh8' in" in heard.warnings[0]
    )
    examples = everything(games)
    assert len(examples) > 3_000
    assert_every_ply(games, plies(good))
    splits = [
        {" ".join(asked(example)[0].split(" ")[:4]) for example in part}
        for part in (examples[: games.num_train], examples[games.num_train :])
    ]
    assert not splits[0] & splits[1]
    kinds = Counter(example.kind for example in examples)
    assert all(kinds[kind] > 10 for kind in ("quiet", "capture", "check", "castling"))
    task = load_task("chess-env", seed=1, history=4, data=str(path))
    table = RewardScorer(task).score(examples, [[example.answer] for example in examples])
    assert all((scores == 1).all() for scores in table.parts.values())


@pytest.mark.engine
@pytest.mark.slow
def test_real_games_compressed_and_with_other_line_ends_are_the_same(
    played: tuple[Path, str], tmp_path: Path
) -> None:
    plain = Games(played[0], seed=2)
    packed = tmp_path / "played.pgn.gz"
    with open(played[0], "rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    windows = tmp_path / "windows.pgn"
    windows.write_bytes(b"\xef\xbb\xbf" + played[0].read_bytes().replace(b"\n", b"\r\n"))
    for other in (Games(packed, seed=2), Games(windows, seed=2)):
        assert [other.train(i) for i in range(200)] == [plain.train(i) for i in range(200)]
        assert [other.held_out(i) for i in range(200)] == [plain.held_out(i) for i in range(200)]

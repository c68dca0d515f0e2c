"""RookWorld's text lines: kept verbatim, and skipped if they contradict the rules of chess."""

import json
import math
from itertools import permutations
from pathlib import Path

import chess
import pytest

from minigrpo.runtime.flags import ConfigError
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.lines import Line, Lines, json_line, text_line
from minigrpo.tasks.registry import load_task
from minigrpo.tasks.self_play import Positions
from minigrpo.tasks.splits import is_held_out, split_of
from minigrpo.tasks.transitions import transition
from minigrpo.types import Example

from .test_best_move import annotated
from .test_games import Heard

AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq"
START = chess.STARTING_FEN
REPEATED = "4k3/8/8/8/8/8/8/4K2R w - - 16 40"
# RookWorld pads its lines to columns, and does not sort the moves
ENDGAME = "8/8/8/8/8/2k5/7R/K7 w - - 0 60"
PADDED = f"P: {ENDGAME:90}M: {'a1b1 h2h3 h2h8':30}E: {'5.31 6.0 -0.02':40}B: h2h3"
MATED = "P: k7/8/1K6/8/8/8/8/7R b - - 5 60 M: a8b8 E: -999.99 B: a8b8"


@pytest.mark.parametrize(
    ("line", "prompt", "answer", "kind"),
    [
        (
            f"A: {START}+e2e4+e2e4+{AFTER_E4} - 0 1+0.001+0+0",
            f"A: {START}+e2e4+e2e4+",
            f"{AFTER_E4} - 0 1+0.001+0+0",
            "quiet",
        ),
        (
            f"{START}+e2e4+d2d4 e2e4+{AFTER_E4} e3 0 1+0.001+0+0\r\n",
            f"A: {START}+e2e4+d2d4 e2e4+",
            None,
            "quiet",
        ),
        (f"A: {START}+e2e4+{AFTER_E4} e3 0 1+0.001+0+0", f"A: {START}+e2e4+", None, "quiet"),
        (
            f"{START}+e2e5+e2e5+{START}+-1.0+0+1",
            f"A: {START}+e2e5+e2e5+",
            f"{START}+-1.0+0+1",
            "illegal",
        ),
        (f"{START}+e2e9++{START}+0.0+0+1", f"A: {START}+e2e9++", f"{START}+0.0+0+1", "illegal"),
        (f"{REPEATED}+h1h2+x+4k3/8/8/8/8/8/7R/4K3 b - - 17 40+0.5+1+0", None, None, "quiet"),
        (PADDED, f"P: {ENDGAME}", PADDED.removeprefix(f"P: {ENDGAME}"), "best-move"),
        (MATED, "P: k7/8/1K6/8/8/8/8/7R b - - 5 60", " M: a8b8 E: -999.99 B: a8b8", "best-move"),
    ],
)
def test_a_good_line_is_kept_as_it_stands(
    line: str, prompt: str | None, answer: str | None, kind: str
) -> None:
    read = text_line(line.strip())
    assert (read.prompt + read.answer).removeprefix("A: ") == line.strip().removeprefix("A: ")
    assert prompt in (None, read.prompt) and answer in (None, read.answer)
    assert read.kind == kind


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hello", "1 fields, where fen.move.history.fen.reward.terminated.truncated has 7"),
        (f"A: {START}+e2e4++x+{AFTER_E4} - 0 1+0.001+0+0", "8 fields"),
        (f"A: {START.replace('K', 'Q')}+e2e4++{AFTER_E4} - 0 1+0.001+0+0", "no valid position"),
        (f"A: {START}+e2e4++{AFTER_E4} - 0 1+1.0+1+0", "e2e4 ends with 0.001.0.0, not 1.0.1.0"),
        (
            f"A: {START}+e2e4++{AFTER_E4} d3 0 1+0.001+0+0",
            "e2e4 leads to .* e3 0 1, not to .* d3 0 1",
        ),
        (
            f"A: {START}+e2e5++{AFTER_E4} e3 0 1+0.001+0+0",
            "e2e5 leads to",
        ),  # an illegal move that was carried out
        (f"A: {START}+e2e5++{START}+0.001+0+0", "e2e5 ends with -1.0.0.1 or 0.0.0.1"),
        (
            f"A: "
            f"{START}+g1f3++{'rnbqkbnr/pppppppp/8/8/8/5N2/PPPPPPPP/RNBQKB1R b KQkq - 1 1'}+0.5+1+0",
            "g1f3 ends with",
        ),
        (f"P: {START}", "a P line without M:"),
        (f"P: {START} M: e2e4 E: 0.3 0.2 B: e2e4", "must be M: moves E: as many numbers"),
        (f"P: {START} M: e2e4 E: 0.3", "must be M: moves"),
        (f"P: {START} M: e2e5 E: 0.3 B: e2e5", "e2e5 is not legal"),
        (f"P: {START} M: e2e4 e2e4 E: 0.3 0.3 B: e2e4", "a move occurs twice"),
        ("P: nowhere M: e2e4 E: 0.3 B: e2e4", "no valid position"),
    ],
)
def test_a_damaged_line_says_why(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        text_line(line)


def chess_env_lines(number: int) -> list[str]:
    """A lines of self-play. Every other one is written as python-chess does by default: no en
    passant square unless a pawn can capture.
    """
    lines = []
    for i in range(number):
        example = Positions(0, ("train", "held-out")[i % 4 == 0], history=2).example(i)
        line = example.prompt + example.answer
        if i % 2 and example.kind != "illegal":
            fen, uci, history, _, *ending = line.removeprefix("A: ").split("+")
            board = chess.Board(fen)
            board.push_uci(uci)
            line = "+".join(
                [chess.Board(fen).fen(), uci, history.replace(",", " "), board.fen(), *ending]
            )
        lines.append(line)
    return lines


def test_a_file_of_both_kinds(tmp_path: Path) -> None:
    path, heard = tmp_path / "lines.txt", Heard()
    records = map(json.loads, annotated(tmp_path / "a.jsonl", 40).read_text().splitlines())
    good = [
        *chess_env_lines(120),
        PADDED,
        MATED,
        *(record["prompt"] + record["answer"] for record in records),
    ]
    raw = [line.encode() for line in good]
    path.write_bytes(b"\n".join([b"nonsense", *raw[:60], b"", b"P: no", b"\xff", *raw[60:]]))
    lines = Lines(path, 0, text_line, listener=heard)
    assert heard.warnings == [
        f"{path}: skipped 3 of 166 lines: line 1 (1 fields, where "
        "fen+move+history+fen+reward+terminated+truncated has 7), "
        "line 63 (a P line without M:), line 64 ('utf-8' codec can't decode byte 0xff in position "
        "0: invalid start byte)"
    ]
    # a position whose two spellings are in different splits is in neither
    kept = [line for line in good if split_of(text_line(line).spellings) is not None]
    assert 0 < len(good) - len(kept) < len(good) / 20
    good = kept
    assert lines.prompt_prefixes == ("A: ", "P: ")
    assert lines.num_train + lines.num_held_out == len(good)
    task = load_task("chess-env", seed=0, data=str(path))
    assert {"exact_fen", "best"} <= set(task.parts)
    train = [task.train(i) for i in range(lines.num_train)]
    held_out = [task.held_out(i) for i in range(lines.num_held_out)]
    texts = {(example.prompt + example.answer).removeprefix("A: ") for example in train + held_out}
    assert texts == {line.removeprefix("A: ") for line in good}
    for example in train + held_out:
        scores = task.score(example, example.answer).values()
        assert {x for x in scores if not math.isnan(x)} == {1.0}
    assert task.train(lines.num_train + 5).index == lines.num_train + 5
    only = load_task("best-move", seed=0, data=str(path))
    assert set(only.parts) == {"best", "moves", "evals", "legal", "format"}
    assert {only.train(i).kind for i in range(30)} == {"best-move"}


def test_a_position_is_never_in_both_splits_whichever_file_or_spelling_it_comes_from() -> None:
    """Self-play and games write an en passant square after every double step; a file may leave out
    one of no use. After 1. e4, say, both FENs are the same position.
    """
    useless, kept = 0, 0
    for number in range(96):
        split = ("train", "held-out")[number % 2]
        example = Positions(0, split).example(number)
        fen, uci, *_ = example.prompt.removeprefix("A: ").split("+")
        short = chess.Board(fen).fen()
        lines = [text_line(f"{x}+{uci}++{transition(x, uci)}") for x in (fen, short)]
        splits = [split_of(line.spellings) for line in lines]
        assert splits[0] in (None, is_held_out(fen)) and is_held_out(fen) == (split == "held-out")
        assert splits[1] == is_held_out(short)
        assert splits[0] is None or splits[0] == splits[1]
        useless += fen != short
        kept += splits[0] is not None
    assert useless > 4 and kept > 88


def test_an_annotated_line() -> None:
    record = {"prompt": f"P: {START}", "answer": " M: e2e4 E: 0.3 B: e2e4", "made_by": "somebody"}
    assert json_line(json.dumps(record)) == Line(
        record["prompt"], record["answer"], (START, START), "best-move", record
    )
    for wrong in (
        "[1]",
        "no",
        '{"prompt": 1, "answer": ""}',
        '{"prompt": "P: x", "answer": ""}',
        "[" * 4000,
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - the message is tested above
            json_line(wrong)


def test_chess_env_scores_against_a_reward_of_minus_one() -> None:
    line = text_line(f"{START}+e2e5++{START}+-1.0+0+1")
    scores = ChessEnv(0).score(Example(line.prompt, line.answer), f"{START}+0.0+0+1")
    assert (
        scores["reward_value"] == 0
        and scores["format"] == scores["exact_fen"] == scores["flags"] == 1
    )


def test_a_line_that_becomes_another_valid_one_during_the_run_is_refused(tmp_path: Path) -> None:
    """It would be trained on without a word, and could be a held-out one."""
    file, ranks = tmp_path / "lines.txt", range(6)
    boards = [["8"] * 7 + ["K7"] for _ in range(30)]
    for board, (king, rook) in zip(boards, permutations(ranks, 2), strict=True):
        board[king], board[rook] = "2k5", "7R"
    after = "M: a1b1 E: 5.0 B: a1b1"
    lines = [f"P: {'/'.join(board)} w - - 0 60 {after}\n" for board in boards]
    file.write_text("".join(lines))
    found = Lines(file, seed=0, parse=text_line)
    with open(file, "a") as more:  # as `minigrpo annotate` does
        more.write(lines[0])
    before = [found.train(i).prompt for i in range(found.num_train)]
    assert all(f"{prompt} {after}\n" in lines for prompt in before)
    with open(file, "r+") as same:  # in place
        same.write("".join(lines[::-1]))
    with pytest.raises(ConfigError, match=r"--data .*, line \d+: was changed during the run"):
        found.train(0)

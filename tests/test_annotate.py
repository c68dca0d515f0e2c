"""Annotation by a real engine, and the error messages if there is none."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chess
import chess.engine
import pytest

from minigrpo import Config, Trainer
from minigrpo.runtime.files import lock_file
from minigrpo.runtime.flags import ConfigError
from minigrpo.tasks.best_move import check, read
from minigrpo.tasks.games import Games
from minigrpo.tasks.registry import load_task
from minigrpo.tools import annotate
from minigrpo.tools.annotate import Engines, find_engine, key
from minigrpo.tools.uci import answers_uci

from .gradients import TINY
from .test_games import SMALL, asked, everything

engine = pytest.mark.engine
Run = Callable[..., list[dict[str, str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Run:
    """Run the program and return the records of its file; it finds an engine only in tests that
    are marked `engine`.
    """
    if not request.node.get_closest_marker("engine"):
        monkeypatch.setattr(annotate, "PLACES", ("no-such-fish",))

    def program(out: Path, *arguments: object) -> list[dict[str, str]]:
        annotate.main(["--out", str(out), "--nodes", "300", *map(str, arguments)])
        return [json.loads(line) for line in out.read_text().splitlines()]

    return program


@engine
def test_an_interrupted_run_continues_and_analyses_nothing_twice(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, "--n", 40)
    run(parts, "--n", 15)
    with open(parts, "r+b") as file:
        file.truncate(parts.stat().st_size - 20)  # the process died in the middle of a line
    asked_for: list[str] = []
    original = Engines.annotate
    monkeypatch.setattr(
        Engines,
        "annotate",
        lambda self, fen, limit: asked_for.append(fen) or original(self, fen, limit),
    )
    records = run(parts, "--n", 40, "--workers", 3)
    assert parts.read_bytes() == whole.read_bytes()
    assert len(asked_for) == 40 - 14
    assert len({key(record["prompt"]) for record in records}) == 40
    assert run(parts, "--n", 40) == records and len(asked_for) == 40 - 14


@engine
@pytest.mark.parametrize("limit", [["--depth", 3], ["--multipv", 2]])
def test_truth_is_legal_and_a_function_of_the_position_and_the_limit(
    tmp_path: Path, run: Run, limit: list[Any]
) -> None:
    records = run(tmp_path / "a.jsonl", "--n", 12, *limit)
    again = run(tmp_path / "b.jsonl", "--n", 6, "--workers", 2, *limit)
    assert again == records[:6]
    for record in records:
        legal = check(record["prompt"], record["answer"]).legal_moves.count()
        advice = read(record["answer"])
        assert len(advice.moves) == min(legal, 2 if "--multipv" in limit else 5)
        assert advice.best == advice.moves[0]


@engine
@pytest.mark.parametrize(
    ("fen", "first", "sign", "worth"),
    [
        ("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1", "a1a8", 1, 999.99),  # mate in one
        ("7k/8/5KQ1/8/8/8/8/8 b - - 0 1", None, 0, 0.0),  # stalemate: nothing to say
        ("k7/8/8/8/8/8/1r6/K1q5 w - - 0 1", None, 0, 0.0),  # mated
        ("3qk3/8/8/8/8/8/8/4K3 b - - 0 1", None, 1, None),  # Black to move, and a queen up
        ("3qk3/8/8/8/8/8/8/4K3 w - - 0 1", None, -1, None),
    ],
)
def test_evaluations_are_those_of_the_side_to_move(
    fen: str, first: str | None, sign: int, worth: float | None
) -> None:
    engines = Engines(find_engine(), 1, multipv=3)
    text = engines.annotate(fen, chess.engine.Limit(nodes=3000))
    engines.close()
    if not sign:
        assert text == ""
        return
    advice = read(text)
    assert advice.well_formed and advice.evals[0] * sign > 2
    assert first in (None, advice.best) and worth in (None, advice.evals[0])


@engine
def test_positions_of_games_then_a_warm_start_then_grpo(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "annotated.jsonl"
    records = run(data, "--n", 100, "--positions", SMALL)
    assert "there are no more positions" in capfd.readouterr().out
    fens = {key(asked(example)[0]) for example in everything(Games(SMALL, seed=0))}
    assert {key(record["prompt"].removeprefix("P: ")) for record in records} == fens
    options = {
        **TINY,
        "task": "best-move",
        "data": str(data),
        "reward_weights": "",
        "max_new_tokens": 90,
        "max_steps": 2,
    }
    Trainer(
        Config.of(**{**options, "loss": "nll", "out_dir": str(tmp_path / "warm")}), quiet=True
    ).fit()
    Trainer(
        Config.of(
            **{**options, "init_from": str(tmp_path / "warm"), "out_dir": str(tmp_path / "grpo")}
        ),
        quiet=True,
    ).fit()
    last = json.loads((tmp_path / "grpo" / "eval.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and {
        "best",
        "moves",
        "evals",
        "legal",
        "format",
        "exact/best-move",
    } <= set(last)
    task = load_task("best-move", seed=0, data=str(data))
    for number in range(20):
        assert task.score(task.train(number), task.train(number).answer) == dict.fromkeys(
            task.parts, 1.0
        )


@engine
def test_when_an_engine_dies_its_answers_so_far_are_kept(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = chess.engine.SimpleEngine.analyse, []

    def analyse(self: chess.engine.SimpleEngine, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 10:
            self.transport.kill()
        return original(self, *args, **options)

    monkeypatch.setattr(chess.engine.SimpleEngine, "analyse", analyse)
    failed = "error: the engine failed .*; the same command continues from here"
    with pytest.raises(SystemExit, match=failed):
        run(tmp_path / "a.jsonl", "--n", 30)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n", 0], "--n must be at least 1, got 0"),
        (["--depth", -1], "--depth must be at least 0, got -1"),
        (["--engine", "/nowhere/fish"], "--engine /nowhere/fish: no such program"),
        (["--engine", "true"], "/true: is no UCI engine (it does not answer uciok)"),
        ([], "no Stockfish: apt-get install stockfish, or --engine PATH"),
        (["--out", "a.txt"], "--out must end with .jsonl, got a.txt"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[Any], words: str, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "a.jsonl", *arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1


@engine
@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ('{"prompt": "x"}\n', [], "line 1: was not written by this tool; take another file"),
        (
            '{"prompt": "P: x", "answer": "", "made_by": "Elder Fish"}\n',
            [],
            "was made by Elder Fish, this would be",
        ),
        ("", ["--positions", "games.pgn"], "games.pgn: cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_does_not_fit_is_left_alone(
    content: str,
    arguments: list[Any],
    words: str,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        run(path, *arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b'{"prompt": "P: 8/8 w - -", "ans', b""),  # this tool died while it wrote
        (b'{"pro', b""),
        (b'{"prompt": "P: x", "made_by": "Fish"}', b'{"prompt": "P: x", "made_by": "Fish"}\n'),
        (b'{"question": "6*7?", "answer": "42"}', None),
        (b'{"prompt": "P: x", "answer": "e2e4"}', None),
        (b"precious", None),
        (b'{"prompt": "P: x", "made_by": "Fish"}\nprecious', None),
    ],
)
def test_only_a_line_of_its_own_is_cut_off(
    content: bytes, left: bytes | None, tmp_path: Path
) -> None:
    """A file that did not end with a line break lost its last line, whoever had written it."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    if left is None:
        with pytest.raises(ConfigError, match=r"line \d: was not written by this tool"):
            annotate.read_done(file, "Fish")
    else:
        annotate.read_done(file, "Fish")
    assert file.read_bytes() == (content if left is None else left)


@engine
def test_two_programs_do_not_write_to_one_file(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / "a.jsonl", "a") as file:
        assert lock_file(file)
        with pytest.raises(SystemExit):
            run(tmp_path / "a.jsonl", "--n", 3)
    assert "a.jsonl: another program is writing to it" in capsys.readouterr().err
    assert len(run(tmp_path / "a.jsonl", "--n", 3)) == 3


def running(mark: bytes) -> list[Path]:
    """The processes that this session has started and that have not ended; needs /proc."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if mark in environment.read_bytes().split(b"\0"):
                found.append(environment.parent)
    return found


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ("exec cat", False),
        ("exec yes", False),
        ("sleep 60 & sleep 60", False),  # with a process of its own
        ("exec tr x y < /dev/zero", False),  # a line without end
        ("read line; echo id name X; echo uciok; exec sleep 60", True),
    ],
)
def test_a_program_is_asked_whether_it_is_an_engine_and_ended(
    body: str, answers: bool, tmp_path: Path, process_mark: bytes
) -> None:
    program = tmp_path / "engine"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    assert answers_uci(str(program), seconds=0.3) == answers
    deadline = time.monotonic() + 10  # a signal to the others of a group arrives a moment later
    while running(process_mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(process_mark)

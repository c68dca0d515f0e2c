"""The best-move task: scores against the engine's answer, and training on both kinds of chess
question in one batch.
"""

import json
import math
import time
from pathlib import Path

import chess
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigrpo import Config, Trainer
from minigrpo.rewards import RewardScorer
from minigrpo.tasks.best_move import BestMove, write
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.registry import load_task
from minigrpo.tasks.self_play import Positions
from minigrpo.types import Example

from .gradients import TINY

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "tests" / "data" / "small.pgn"
START = chess.STARTING_FEN
EXAMPLE = Example(f"P: {START}", " M: e2e4 d2d4 g1f3 E: 0.4 0.3 0.2 B: e2e4", kind="best-move")
HOSTILE = [
    "",
    " ",
    "M:",
    "M: E: B:",
    "M: " + "e2e4 " * 10_000,
    "M:" + " " * 100_000,
    "E: " + "9" * 9999,
    "\x00",
    "\ud800",
    "M: ١e4 E: ١ B: e2e4",
    " M: e2e4 E: nan B: e2e4",
    " M: e2e4 E: 1e9 B: e2e4",
    "x" * 1_000_000,
]


def annotated(path: Path, number: int) -> Path:
    """Write self-play positions with legal moves; a formula, not an engine, makes the
    evaluations.
    """
    with open(path, "w") as file:
        for i in range(number):
            example = Positions(5, ("train", "held-out")[i % 4 == 0]).example(i)
            fen = example.prompt[3:].split("+")[0]
            moves = sorted(move.uci() for move in chess.Board(fen).legal_moves)[:5]
            answer = write([(move, 1.5 - rank / 4) for rank, move in enumerate(moves)])
            file.write(json.dumps({"prompt": f"P: {fen}", "answer": answer}) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "best", "moves", "evals", "legal", "form"),
    [
        (EXAMPLE.answer, 1, 1, 1, 1, 1),
        ("M: e2e4 d2d4 g1f3   E: 0.4 0.3 0.2    B: e2e4 ", 1, 1, 1, 1, 1),
        (" M: g1f3 e2e4 d2d4 E: 0.2 0.4 0.3 B: e2e4", 1, 1, 1, 1, 1),  # in any order
        (" M: e2e4 E: 0.4 B: e2e4", 1, 1 / 3, 1 / 3, 1, 1),
        (" M: e2e4 d2d4 g1f3 E: 1.4 0.3 0.2 B: d2d4", 0, 1, (1 / 2 + 2) / 3, 1, 1),
        (" M: e2e4 e2e4 e2e4 e2e4 E: 0.4 0.4 0.4 0.4 B: e2e4", 1, 1 / 4, 1 / 4, 2 / 5, 1),
        (" M: e2e4 d2d4 a1a8 E: 0.4 0.3 0.2 B: e2e5", 0, 2 / 3, 2 / 3, 2 / 4, 1),
        (" M: e2e4 d2d4 g1f3 E: 0.4 B: e2e4", 1, 1, 1 / 3, 1, 0),
        (" M: e2e4 d2d4 g1f3", 0, 1, 0, 3 / 4, 0),
        (" B: e2e4", 1, 0, 0, 1, 0),
        ("no idea", 0, 0, 0, 0, 0),
    ],
)
def test_parts_of_a_completion(
    text: str, best: float, moves: float, evals: float, legal: float, form: float
) -> None:
    scores = BestMove().score(EXAMPLE, text)
    assert scores == pytest.approx(
        {"best": best, "moves": moves, "evals": evals, "legal": legal, "format": form}, rel=1e-6
    )


def test_evaluations_beyond_a_clear_win_count_as_equal() -> None:
    example = Example(EXAMPLE.prompt, " M: e2e4 E: 999.98 B: e2e4")
    assert BestMove().score(example, " M: e2e4 E: 12.5 B: e2e4")["evals"] == 1
    assert BestMove().score(example, " M: e2e4 E: 9 B: e2e4")["evals"] == pytest.approx(1 / 2)
    assert BestMove().score(example, " M: e2e4 E: -999.98 B: e2e4")["evals"] == pytest.approx(
        1 / 21
    )


@given(
    st.one_of(
        st.text(), st.from_regex(r" M:( [a-h][1-8][a-h][1-8])+ E:( -?[0-9]+\.[0-9])+ B: [a-h][1-8]")
    )
)
def test_any_text_has_parts_between_0_and_1(text: str) -> None:
    assert all(0 <= value <= 1 for value in BestMove().score(EXAMPLE, text).values())


def test_hostile_texts_never_raise_and_are_cheap() -> None:
    BestMove().score(EXAMPLE, "")
    began = time.perf_counter()
    table = BestMove().score_batch([EXAMPLE] * len(HOSTILE), HOSTILE)
    assert time.perf_counter() - began < 0.05
    for values in table.values():
        assert np.isfinite(values).all() and (values >= 0).all() and (values < 1.001).all()
    assert not table["format"].any()


def test_a_part_that_does_not_concern_a_question_is_left_out(tmp_path: Path) -> None:
    task = load_task("chess-env+best-move", seed=0, data=str(annotated(tmp_path / "a.jsonl", 60)))
    examples = [task.train(i) for i in range(8)]
    assert [example.prompt[:3] for example in examples] == ["A: ", "P: "] * 4
    assert [example.index for example in examples] == list(range(8))
    texts = [[example.answer, "junk", EXAMPLE.answer] for example in examples]
    table = RewardScorer(task).score(examples, texts)
    for kind, names in ((0, ChessEnv.parts), (1, BestMove.parts)):
        for name in names.keys() - {"format"}:  # which both kinds have
            scores = table.parts[name]
            assert np.isnan(scores[1 - kind :: 2]).all()
            assert (scores[kind::2, 0] == 1).all() and (scores[kind::2, 1] < 1).all()
    alone = RewardScorer(BestMove()).score(examples[1::2], texts[1::2]).total
    np.testing.assert_allclose(table.total[1::2], alone, atol=1e-6)


@pytest.mark.parametrize("loss", ["grpo", "nll"])
def test_training_steps_on_a_mixed_batch_of_prompts_of_different_lengths(
    tmp_path: Path, loss: str
) -> None:
    data = annotated(tmp_path / "a.jsonl", 60)
    options = {
        **TINY,
        "reward_weights": "",
        "loss": loss,
        "max_new_tokens": 90,
        "max_steps": 2,
        "eval_every": 0,
    }
    trainer = Trainer(
        Config.of(
            **options, task="chess-env+best-move", data=str(data), out_dir=str(tmp_path / "run")
        ),
        quiet=True,
    )
    batch = trainer.source.batch(0)
    assert [example.prompt[0] for example in batch.examples] == ["A", "P", "A", "P"]
    assert len(set(batch.completions.prompt_len.tolist())) > 1
    trainer.fit()
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == 2 and all(math.isfinite(step["loss"]) for step in steps)
    evaluation = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert evaluation["count/best-move"] == 4 and evaluation["n"] == 8
    assert {"exact/best-move", "best", "exact_fen"} <= set(evaluation)


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        (
            "best-move",
            "",
            "--task best-move needs annotated positions, .* got none; `python -m "
            "minigrpo.tools.annotate --out",
        ),
        ("chess-env+best-move", "", "--task chess-env.best-move needs annotated positions"),
        (
            "best-move",
            str(SMALL),
            "small.pgn; .*annotate --out FILE.jsonl --positions FILE.pgn` makes them",
        ),
        (
            "best-move",
            str(ROOT / "examples" / "sums.jsonl"),
            "sums.jsonl: 0 usable examples for training and 0 for",
        ),
        ("chess-env", f"{SMALL},missing.txt", "missing.txt: cannot be read"),
        (
            "chess-env+best-move",
            "LINES.txt",
            "--task chess-env.best-move needs annotated positions, .* got .*LINES.txt",
        ),
    ],
)
def test_what_is_missing_is_one_line_that_says_how_to_get_it(
    task: str, data: str, words: str, tmp_path: Path
) -> None:
    if data == "LINES.txt":  # only chess-env lines
        data = str(tmp_path / data)
        examples = [
            Positions(0, split).example(i) for split in ("train", "held-out") for i in range(3)
        ]
        Path(data).write_text("\n".join(example.prompt + example.answer for example in examples))
    with pytest.raises(ValueError, match=words) as error:
        load_task(task, seed=0, data=data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "name"), [("policy", "best-move"), ("chess-env+policy", "chess-env+best-move")]
)
def test_a_task_is_loaded_under_its_old_name(tmp_path: Path, old: str, name: str) -> None:
    data = str(annotated(tmp_path / "a.jsonl", 60))
    before, now = (load_task(task, seed=0, data=data) for task in (old, name))
    assert before.parts == now.parts
    assert [before.train(i) for i in range(20)] == [now.train(i) for i in range(20)]


def test_several_files_take_turns(tmp_path: Path) -> None:
    data = f"{SMALL},{annotated(tmp_path / 'a.jsonl', 60)}"
    task = load_task("chess-env+best-move", seed=0, data=data)
    assert [task.train(i).kind == "best-move" for i in range(6)] == [False, True] * 3
    # the games have 9 held-out examples, the annotated file has more
    assert task.num_held_out == 2 * 9  # type: ignore[attr-defined]
    assert [task.held_out(i).kind == "best-move" for i in range(18)] == [False, True] * 9
    assert len({task.held_out(i).prompt for i in range(18)}) == 18

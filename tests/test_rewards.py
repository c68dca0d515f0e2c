import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import chess
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.rewards import RewardFunction, RewardScorer, is_valid_fen, reward, similarity
from minigrpo.runtime.pool import MAX_ABANDONED
from minigrpo.runtime.reward_calls import RewardSource
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.countdown import Countdown
from minigrpo.types import Example

ROOT = Path(__file__).parent.parent
ENV = ChessEnv(0)
EXAMPLES = [ENV.train(i) for i in range(64)]
HOSTILE = [
    "",
    "+",
    "+++",
    "\0" * 50,
    "\ud800",
    "٠+0.0+0+0",
    "NaN+nan+0+0",
    "a" * 10**6,
    "+" * 10**6,
    " " * 10**5,
    "9" * 5000,
]


@pytest.mark.parametrize(
    "fen",
    [chess.STARTING_FEN, "4k3/8/8/8/8/8/8/4K3 w - - 0 1", "4k3/8/8/8/8/8/8/R3K3 w Q - 12 2034"],
)
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
def test_a_valid_fen_is_what_python_chess_accepts_and_writes_back(
    example: Example, place: int, character: str
) -> None:
    fen = example.answer.split("+")[0]
    mutant = fen[:place] + character + fen[place + 1 :]
    try:
        board = chess.Board(mutant)
        expected = board.status() == chess.STATUS_VALID and board.fen(en_passant="fen") == mutant
    except ValueError:
        expected = False
    assert is_valid_fen(mutant) == expected


def test_similarity() -> None:
    assert similarity("", "") == 1
    assert similarity("abcd", "abcd") == 1
    assert similarity("abcd", "abxd") == 0.75
    assert similarity("", "ab") == 0


@given(st.text(alphabet="KQrbn12/ +w-", min_size=1, max_size=30), st.data())
def test_similarity_falls_with_each_wrong_character(truth: str, data: st.DataObject) -> None:
    """A character that does not occur in the truth costs exactly one edit."""
    wrong = data.draw(st.sets(st.integers(0, len(truth) - 1)))
    text = "".join("x" if place in wrong else char for place, char in enumerate(truth))
    assert similarity(text, truth) == pytest.approx(1 - len(wrong) / len(truth))
    added = data.draw(st.integers(0, 30))
    longer = len(truth) / (len(truth) + added)
    assert similarity(truth + "x" * added, truth) == pytest.approx(longer)
    assert similarity("x" * added + truth, truth) == pytest.approx(longer)
    assert similarity(truth, truth + "x" * added) == pytest.approx(longer)


def test_parts_tell_what_is_wrong() -> None:
    example = next(e for e in EXAMPLES if e.kind == "quiet")
    fen = example.answer.split("+")[0]
    right = dict.fromkeys(("format", "valid", "similarity", "exact_fen"), 1.0)
    assert ENV.score(example, f"{fen}+1.0+1+0") == {**right, "reward_value": 0.0, "flags": 0.5}
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
    texts = mutants(1563)  # 100,032 of them
    serial, pool = RewardScorer(ENV), RewardScorer(ENV, workers=3)
    a, b = serial.score(EXAMPLES, texts), pool.score(EXAMPLES, texts)
    pool.close()
    assert np.array_equal(a.total, b.total)
    for name in ENV.parts:
        assert np.array_equal(a.parts[name], b.parts[name])
    for p, g in [(0, 0), (17, 3), (63, 1562)]:
        parts = ENV.score(EXAMPLES[p], texts[p][g])
        assert a.total[p, g] == pytest.approx(
            sum(weight * parts[name] for name, weight in ENV.parts.items())
        )


def test_each_distinct_text_of_a_prompt_is_scored_once() -> None:
    class Counting(ChessEnv):
        calls = 0

        def score(self, example, text):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().score(example, text)

    env = Counting(0)
    RewardScorer(env).score(EXAMPLES[:2], [["a", "a", "b"], ["a", "c", "c"]])
    assert env.calls == 4


def test_a_subclass_that_overrides_only_score_is_scored_by_it() -> None:
    class Generous(ChessEnv):
        def score(self, example, text):  # type: ignore[no-untyped-def]
            return dict.fromkeys(self.parts, 0.5)

    table = RewardScorer(Generous(0)).score(EXAMPLES[:1], [["x", "y"]])
    assert all((values == 0.5).all() for values in table.parts.values())


def test_an_error_in_score_batch_ends_the_run() -> None:
    class Broken(ChessEnv):
        def score_batch(self, examples, texts):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        RewardScorer(Broken(0), workers=1).score(EXAMPLES[:1], [["x"]])


def test_weights_choose_and_scale_the_parts() -> None:
    texts = mutants(4)
    table = RewardScorer(ENV, weights={"valid": 2.0}).score(EXAMPLES, texts)
    assert np.array_equal(table.total, 2 * table.parts["valid"])
    with pytest.raises(ValueError, match="--reward-weights: no part typo; allowed: exact_fen"):
        RewardScorer(ENV, weights={"typo": 1.0})


# --- user-defined rewards -------------------------------------------------------------------------

TEXTS = [["good", "bad", "good"], ["bad", "good", "worse"]]


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """An event that hanging rewards wait for; it is set at the end, so that no thread outlives its
    test.
    """
    event = threading.Event()
    yield event
    event.set()


def score(
    function: RewardFunction, workers: int = 2, **options: Any
) -> tuple[np.ndarray, int, list[str]]:
    """The function's scores of TEXTS, how often it failed, and the warnings."""
    warnings: list[str] = []
    scorer = RewardScorer(
        ENV, functions=[function], workers=workers, warn=warnings.append, **options
    )
    table = scorer.score(EXAMPLES[:2], TEXTS)
    scorer.close()
    assert np.array_equal(
        table.parts["similarity"], RewardScorer(ENV).score(EXAMPLES[:2], TEXTS).parts["similarity"]
    )
    return table.parts[function.name], table.failures[function.name], warnings


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_reward_function_is_a_part_with_a_weight(workers: int) -> None:
    @reward(weight=0.5)
    def length(example: Example, text: str) -> float:
        time.sleep(0.01 if text == "good" else 0)  # so that the others are ready first
        return len(text)

    scorer = RewardScorer(ENV, functions=[length], workers=workers)
    table = scorer.score(EXAMPLES[:2], TEXTS)
    scorer.close()
    assert table.parts["length"].tolist() == [[4, 3, 4], [3, 4, 5]]
    without = RewardScorer(ENV).score(EXAMPLES[:2], TEXTS)
    np.testing.assert_allclose(table.total, without.total + 0.5 * table.parts["length"], rtol=1e-6)
    only = RewardScorer(ENV, functions=[length], weights={"length": 2})
    assert only.score(EXAMPLES[:2], TEXTS).total.tolist() == [[8, 6, 8], [6, 8, 10]]


BAD = [None, float("nan"), float("inf"), "1.0", [1.0], 1j, {}, np.array([1.0, 2.0])]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("answer", BAD, ids=repr)
def test_what_is_no_number_gets_the_floor_and_is_counted(answer: Any, workers: int) -> None:
    @reward(floor=-1.0)
    def odd(example: Example, text: str) -> Any:
        return answer if text == "bad" else np.float32(1)

    scores, failures, warnings = score(odd, workers)
    assert scores.tolist() == [[1, -1, 1], [-1, 1, 1]]
    assert failures == 2
    assert len(warnings) == 1 and warnings[0].startswith("reward odd: returned ")


@pytest.mark.parametrize(
    "error", [ValueError("broken"), SystemExit(3), TimeoutError("own"), RecursionError(), "\n" * 3]
)
def test_a_reward_that_raises_gets_the_floor_and_the_others_keep_theirs(error: Any) -> None:
    @reward()
    def odd(example: Example, text: str) -> float:
        if text == "bad":
            raise error if isinstance(error, BaseException) else ValueError(error)
        return 1.0

    scores, failures, warnings = score(odd)
    assert scores.tolist() == [[1, 0, 1], [0, 1, 1]]
    assert failures == 2 and len(warnings) == 1


@pytest.mark.parametrize(
    "answer", [None, 1.0, "123", [1.0], [1.0] * 9, [None] * 4, [1.0, 2.0, "x", 3.0]], ids=repr
)
def test_a_batched_reward_that_returns_a_wrong_count_gives_all_the_floor(answer: Any) -> None:
    seen = []

    @reward(batched=True, floor=0.25)
    def odd(examples: list[Example], texts: list[str]) -> Any:
        seen.append((len(examples), texts))
        return answer

    scores, failures, warnings = score(odd)
    # one call, with each distinct text of a prompt once
    assert seen == [(5, ["good", "bad", "bad", "good", "worse"])]
    assert (scores == 0.25).all()
    assert failures == 6 and len(warnings) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reward_that_hangs_is_given_up_and_the_step_goes_on(
    workers: int, hold: threading.Event
) -> None:
    @reward(timeout_s=0.05)
    def slow(example: Example, text: str) -> float:
        if text == "bad":
            hold.wait()
        return 1.0

    scores, failures, warnings = score(slow, workers)
    assert scores.tolist() == [[1, 0, 1], [0, 1, 1]]
    assert failures == 2
    assert warnings == [
        "reward slow: took longer than 0.05 s; such completions get 0.0, rewards/<part>/failures "
        "counts them"
    ]


def test_if_all_calls_hang_the_number_of_threads_is_bounded_and_scoring_ends(
    hold: threading.Event,
) -> None:
    @reward(timeout_s=0.002)
    def slow(example: Example, text: str) -> float:
        hold.wait()
        return 1.0

    before = threading.active_count()
    texts = [[str(i) for i in range(3 * MAX_ABANDONED)]]
    scorer = RewardScorer(ENV, functions=[slow], workers=2)
    for _ in range(2):
        table = scorer.score(EXAMPLES[:1], texts)
        assert (table.parts["slow"] == 0).all()
        assert table.failures["slow"] == 3 * MAX_ABANDONED
    assert threading.active_count() - before <= MAX_ABANDONED + 2


def test_a_thread_that_returns_late_frees_its_place() -> None:
    """A reward that is often a little late must not use up the pool during a long run."""
    go = threading.Event()

    @reward(timeout_s=0.01)
    def late(example: Example, text: str) -> float:
        go.wait()
        return 1.0

    scorer = RewardScorer(ENV, functions=[late], workers=2)
    for turn in range(MAX_ABANDONED):
        go.clear()
        assert scorer.score(EXAMPLES[:1], [["a", "b"]]).failures == {"late": 2}
        assert scorer.pool.num_abandoned == 2
        go.set()
        end = time.monotonic() + 10
        while scorer.pool.num_abandoned:
            assert time.monotonic() < end, turn
            time.sleep(0.001)
    assert scorer.pool.alive == 2
    scorer.close()


def test_a_result_that_is_asked_for_twice_is_the_same_and_gives_up_once(
    hold: threading.Event,
) -> None:
    @reward(timeout_s=0.02)
    def slow(example: Example, text: str) -> float:
        hold.wait()
        return 1.0

    scorer = RewardScorer(ENV, functions=[slow], workers=2)
    pending = scorer.submit(EXAMPLES[:1], [["a"]])
    first = pending.result()
    assert pending.result() is first
    assert scorer.pool.num_abandoned == 1


def test_a_process_whose_reward_hangs_exits(tmp_path: Path) -> None:
    program = tmp_path / "hang.py"
    program.write_text("""
import time
from minigrpo.rewards import RewardScorer, reward
from minigrpo.tasks.chess_env import ChessEnv

@reward(timeout_s=0.1)
def hangs(example, text):
    time.sleep(1000)

env = ChessEnv(0)
scorer = RewardScorer(env, functions=[hangs], workers=2)
print(scorer.score([env.train(0)], [["a", "b"]]).failures)
""")
    done = subprocess.run(
        [sys.executable, program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"{'hangs': 2}\n"), done.stderr


def test_a_task_without_score_batch_is_scored_text_by_text_and_may_fail() -> None:
    class Fragile:
        parts = {"length": 1.0}  # noqa: RUF012

        def score(self, example: Example, text: str) -> dict[str, float]:
            return {"length": float(len(text))} if text != "bad" else {}

    warnings: list[str] = []
    table = RewardScorer(Fragile(), warn=warnings.append).score(EXAMPLES[:2], TEXTS)  # type: ignore[arg-type]
    assert table.total.tolist() == [[4, 0, 4], [0, 4, 5]]
    assert table.failures == {"length": 2}
    assert "without length" in warnings[0]


def test_a_part_has_one_name() -> None:
    @reward()
    def similarity(example: Example, text: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match="--rewards: the task already has a part similarity"):
        RewardScorer(ENV, functions=[similarity])


@pytest.mark.parametrize("way", ["one", "batched", "grouped"])
def test_a_function_that_changes_its_example_changes_no_other_score(way: str) -> None:
    def takes_all(example: Any, texts: Any) -> Any:
        for one in example if way == "batched" else [example]:
            one.fields["nums"].clear()
        return 0.0 if way == "one" else [0.0] * len(texts)

    arguments = {} if way == "one" else {way: True}
    scorer = RewardScorer(Countdown(0), functions=[reward(**arguments)(takes_all)])
    example = Example("", "", fields={"nums": [1, 2], "target": 3})
    tables = [scorer.score([example], [["1+2", "1"]]) for _ in range(2)]
    assert [table.parts["solved"].tolist() for table in tables] == [[[1, 0]]] * 2
    assert not sum(table.failures["takes_all"] for table in tables)
    assert example.fields["nums"] == [1, 2]


@pytest.mark.parametrize("kind", ["dict", "array"])
def test_an_answer_that_a_function_uses_again_is_copied(kind: str) -> None:
    """Answers are checked after all calls: each completion would get the last one's score."""

    class Reuses:
        parts: ClassVar[dict[str, float]] = {"len": 1.0}
        out: ClassVar[dict[str, float]] = {}

        def score(self, example: Example, text: str) -> dict[str, float]:
            self.out["len"] = float(len(text))
            return self.out

    buffer = np.zeros(1)

    def call(examples: Any, texts: Any) -> dict[str, np.ndarray]:
        buffer[:] = len(texts[0])
        return {"len": buffer}

    if kind == "dict":
        scorer = RewardScorer(Reuses())  # type: ignore[arg-type]
        table = scorer.score([Example("p", "a")], [["x", "yy", "zzz"]])
        assert table.total.tolist() == [[1, 2, 3]]
        scorer.close()
    else:
        source = RewardSource(["len"], call, kind="batched", timeout_s=1.0)
        first, second = source.answer([0], ["x"]), source.answer([0], ["yy"])
        assert first["len"][0] == 1 and second["len"][0] == 2

"""A run's logs: what is written, what a resume keeps, and what a full disk may do."""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from minigrpo.metrics import Graded
from minigrpo.run import logging
from minigrpo.run.console import Console
from minigrpo.run.logging import HELD_OUT, SAMPLES, RunLog, read_jsonl, to_json
from minigrpo.text.encoding import to_completions
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.types import Completion, Example, RewardTable, RolloutBatch, Scores

from .steps import group
from .tiny import partly_known

SAMPLE = {"source": "train", "prompt": "2+2=", "completion": "5", "rewards": {"exact": 0.0}}


def log_of(folder: Path, step: int = 0, said: Any = None) -> RunLog:
    log = RunLog(pytest.fail if said is None else said.append)
    log.open(folder, step, folder)
    return log


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(path)]


def events(folder: Path, tag: str) -> list[int]:
    """The steps that TensorBoard shows of a curve, after purging what a lost run wrote."""
    shown = []
    for file in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime):
        for event in EventFileLoader(str(file)).Load():
            if event.HasField("session_log"):
                shown = [step for step in shown if step < event.step]
            shown += [event.step for value in event.summary.value if value.tag == tag]
    return shown


def test_what_is_logged_is_read_back_and_a_resume_drops_later_lines(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.evaluation(0, {"n": 8.0, "exact": 0.5, "exact/a": 8.0})
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.0 / step, "rewards/exact/mean": 0.0})
        log.write(SAMPLES, step, [SAMPLE, SAMPLE])
    log.write(HELD_OUT, 2, [{"truth": "4"}], mode="w")
    log.evaluation(2, {"exact": 0.75, "reward": float("nan")})
    log.write(HELD_OUT, 3, [{"truth": "4"}, {"truth": "5"}], mode="w")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = log_of(tmp_path, 2)
    first, second = read_jsonl(tmp_path / "eval.jsonl")
    assert first == {"step": 0, "n": 8.0, "exact": 0.5, "exact/a": 8.0}
    assert second == {"step": 2, "exact": 0.75, "reward": None}
    again.step(3, {"loss": 7.0})
    again.close()
    kept = before.splitlines(keepends=True)[:2]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b"".join(kept))
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert steps_of(tmp_path / "samples.jsonl") == [1, 1, 2, 2]
    assert steps_of(tmp_path / "held_out.jsonl") == []  # of a step that is made again
    assert events(tmp_path, "train/loss") == [1, 2, 3]
    assert events(tmp_path, "eval/exact") == [0, 2]
    log_of(tmp_path, 0).close()
    assert steps_of(tmp_path / "metrics.jsonl") == []
    assert steps_of(tmp_path / "eval.jsonl") == [0]


@pytest.mark.parametrize("line", [b'{"step": 2, "lo', b"\xff\xfe"])
def test_a_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    """Also if a run is writing the last line, or was killed while it did."""
    whole = [to_json({"step": step}).encode() for step in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(whole) + line)
    assert len(read_jsonl(path)) == 3
    path.write_bytes(b"".join((whole[0], line, b"\n", *whole[1:])))
    log = log_of(tmp_path, 3)
    assert steps_of(path) == [1, 2, 3]
    log.step(4, {})
    assert steps_of(path) == [1, 2, 3, 4]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), json_values))
def test_records_are_strict_json(record: dict[str, Any]) -> None:
    text = to_json(record)
    assert text.endswith("\n") and text.count("\n") == 1 and text.isascii()

    def strict(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(text, parse_constant=strict)
    if "nan" not in str(record) and "inf" not in str(record):
        assert found == record


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that fills up: a write beyond this many bytes of a file fails, or takes a part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_warned_of_and_training_goes_on(tmp_path: Path) -> None:
    said = list[str]()
    log = log_of(tmp_path, said=said)
    log.step(1, {"loss": 1.0})
    with files_of_at_most(60):
        for step in range(2, 9):
            log.step(step, {"loss": 1.0})
            log.evaluation(step, {"exact": 0.5})
            log.write(SAMPLES, step, [SAMPLE])
        assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]
    for step in (9, 10):
        log.step(step, {"loss": 1.0})
    log.close()
    assert len({*said}) == 2  # of TensorBoard, and of the files
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 9, 10]


def test_samples_say_what_a_group_was_and_how_it_was_scored(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("chess")
    rows = [[*tokenizer.encode("abc"), tokenizer.eot], tokenizer.encode("4")]
    total = np.array([[0.0, 1.0]])
    no = total < 0
    batch = RolloutBatch(
        examples=[Example("2+2=", "4", index=7, kind="easy")],
        completions=to_completions([[1, 2, 3]], [rows]),
        texts=[group("abc", "4")],
        rewards=RewardTable(
            total,
            total > 0,
            {"exact": Scores(total, ~no, failed=no), "other": Scores(total, no, failed=no)},
        ),
        advantages=torch.tensor([[-1.0, 1.0]]),
    )
    log = log_of(tmp_path)
    for step in (9, 10):
        logging.log_group(log, batch, step, tokenizer)
    first, second = read_jsonl(tmp_path / "samples.jsonl")
    expected = {
        "step": 10,
        "index": 7,
        "kind": "easy",
        "truth": "4",
        "rewards": {"exact": 0.0},
        "reward": None,
    }
    assert first.items() >= expected.items()
    assert "".join(first["tokens"][:-1]) == "abc"
    assert second["tokens"] == ["4"]
    assert second["advantage"] == second["reward"] == 1.0
    logging.log_group(RunLog(pytest.fail), batch, 10, tokenizer)  # of another process


def graded(answers: list[list[float | None]], texts: list[list[Completion]]) -> Graded:
    examples = [Example(f"{i}?", "a", i, fields={"level": i}) for i in range(len(answers))]
    total = partly_known(answers)
    scores = Scores(total.values, total.known, failed=~total.known)
    table = RewardTable(total.values, total.known, {"good": scores})
    return Graded(examples, texts, table, "exact")


def test_answers_are_kept_with_the_mean_of_what_was_sampled(tmp_path: Path) -> None:
    greedy = graded([[1.0], [None]], [group("a"), group("b")])
    drawn = graded([[1.0, 0.0], [None, 3.0]], [group("a", "b")] * 2)
    logging.log_held_out(log_of(tmp_path), greedy, drawn, 4)
    first, second = read_jsonl(tmp_path / "held_out.jsonl")
    assert first["greedy"] == {"exact": 1.0, "good": 1.0, "reward": 1.0}
    assert first["sampled"] == {"exact": 0.5, "good": 0.5, "reward": 0.5}
    assert second["sampled"]["good"] == 3.0
    assert "good" not in second["greedy"]
    assert first["example"] == logging.digest(greedy.examples[0]) != second["example"]
    assert len(read_jsonl(tmp_path / "samples.jsonl")) == 4


def test_progress_is_a_line_every_fifteen_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr("minigrpo.run.console.time.monotonic", lambda: clock)
    console = Console()
    said = []
    for step in (1, 2, 3):
        clock += 10
        console.progress(step, 4, {"reward": step, "step_time": 10.0}, always=step == 1)
        said.append(capsys.readouterr().out != "")
    clock += 20
    console.evaluating(5, 8)
    said.append(capsys.readouterr().out != "")
    assert said == [True, False, True, True]


def test_what_a_stream_cannot_show_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without Unicode, a name of a file that is none, and a stream that is closed."""
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii"))
    Console().table("naïve", ["é", "b" * 150], [["→", "[bold]"]])
    Console().say("\ud800 plain")
    assert shown.getvalue().isascii()
    for text in (b"plain", b"b" * 150, b"[bold]"):
        assert text in shown.getvalue()
    sys.stdout.close()
    Console().table("plain", [""], [])


TALK = """
from minigrpo.run.console import Console
console = Console()
for i in range(4000):
    console.say(f"line {i}")
console.warn("done")
"""


def test_a_reader_that_leaves_does_not_end_the_program() -> None:
    """`minigrpo train | head`."""
    with Popen([sys.executable, "-c", TALK], stdout=PIPE, stderr=PIPE) as process:
        assert b"line" in process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 0
    assert errors.count(b"\n") == 1

"""Misuse of a run: its folder, its logs, its checkpoints, its end.

Most ids name the attack's number in the list of attacks that this project is held to.
"""

import contextlib
import copy
import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from minigrpo import Config, Trainer
from minigrpo import trainer as trainer_module
from minigrpo.learner import Learner
from minigrpo.losses import advantages, policy_loss
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import checkpoint, log_files, signals
from minigrpo.runtime.build import make_token_scoring
from minigrpo.runtime.checkpoint import (
    CheckpointError,
    checkpoints,
    find_checkpoint,
    load_checkpoint,
    path_of,
    save_checkpoint,
)
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.failures import Diverged, NotFinite, RunFailed
from minigrpo.runtime.files import write_whole
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.folder import make_folder, said_gone, working_folder
from minigrpo.runtime.guard import check_weights, weight_norm
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.outputs import check_output_file, check_output_folder
from minigrpo.runtime.resume import (
    changed,
    check_same_shape,
    contents_of_files,
    other_contents,
    same_files,
)
from minigrpo.runtime.run_log import RunLog
from minigrpo.runtime.settings import read_record
from minigrpo.runtime.trained import load_model
from minigrpo.tools import cli, evaluate, train
from minigrpo.types import Example, RolloutBatch

from . import bpe
from .conftest import SHAPES, make_completions
from .test_checkpoint import save
from .test_reliability import CHEAP, make, resave

DEEP = "[" * 100_000


def attack(number: int, *values: Any, name: str = "") -> Any:
    return pytest.param(*values, id=" ".join(filter(None, (f"attack {number}", name))))


def strict_json(text: str) -> Any:
    """Refuses NaN and Infinity, which Python's parser would accept."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def records(file: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in file.read_text().splitlines()]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    make(folder, max_steps=4, eval_every=2).fit()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --- logs -----------------------------------------------------------------------------------------


def test_a_full_disk_under_the_logs_is_said_once_and_nothing_is_missing_when_there_is_room(
    tmp_path: Path,
) -> None:
    """Attack 1."""
    said: list[str] = []
    log = RunLog(tmp_path, said.append, start_step=0)
    log.step(1, {"loss": 1.0})
    with files_of_at_most(30):
        for step in (2, 3):
            log.step(step, {"loss": 1.0})
            log.evaluation(step, {"exact": 0.5})
            log.sample_text(step, "text")
        assert len(said) == 1 and "NOT WRITTEN (File too large)" in said[0]
        assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")  # no half line
    log.step(4, {"loss": 1.0})
    log.evaluation(4, {"exact": 0.5})
    log.close()
    assert len(said) == 2 and "written again" in said[1]
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [record["step"] for record in records(tmp_path / "eval.jsonl")] == [2, 3, 4]
    (events,) = (tmp_path / "tensorboard").iterdir()
    shown = [(e.step, v.tag) for e in EventFileLoader(str(events)).Load() for v in e.summary.value]
    assert [step for step, tag in shown if tag == "train/loss"] == [1, 2, 3, 4]
    assert [step for step, tag in shown if tag == "samples/text_summary"] == [2, 3]


def test_what_never_fits_is_counted_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(tmp_path, said.append, start_step=0)
    with files_of_at_most(10):
        log.step(1, {"loss": 1.0})
        log.close()
    assert "metrics.jsonl: 1 records could not be written" in said[1]


def test_a_summary_that_does_not_fit_leaves_none_rather_than_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack 1: it was a file of 0 bytes."""
    trainer, said = make(tmp_path / "run"), list[str]()
    monkeypatch.setattr(trainer.screen, "warn", said.append)
    trainer.run_dir.write_summary({"status": "stopped"})
    with files_of_at_most(10):
        trainer.run_dir.write_summary({"status": "finished", "wall_seconds": 1.0})
    assert not list((tmp_path / "run").glob("summary.json*"))
    assert len(said) == 1 and "summary.json: NOT WRITTEN (File too large)" in said[0]


def test_what_is_not_finite_is_null_and_counted_in_every_file(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(tmp_path, said.append, start_step=0)
    bad = {"a": float("nan"), "b": float("inf"), "c": 1.0}
    log.step(1, bad)
    log.evaluation(1, bad)
    log.sample(1, {"parts": bad, "reward": float("-inf")})
    log.close()
    expected = {"step": 1, "a": None, "b": None, "c": 1.0, "num_nonfinite": 2}
    assert records(tmp_path / "metrics.jsonl") == records(tmp_path / "eval.jsonl") == [expected]
    (sample,) = records(tmp_path / "samples.jsonl")
    assert sample["parts"] == {"a": None, "b": None, "c": 1.0} and sample["num_nonfinite"] == 3
    again = RunLog(tmp_path, said.append, start_step=1)
    again.close()
    (seen,) = again.evaluated  # numbers again, for the table at the end of the run
    assert str(seen) == "{'step': 1, 'a': nan, 'b': nan, 'c': 1.0}" and not said


def test_the_seconds_of_a_run_are_those_of_all_its_parts_or_unknown(run: Path) -> None:
    """A killed part leaves no summary, and not the one of the part before it."""
    file, before = run / "summary.json", json.loads((run / "summary.json").read_text())
    file.write_text(json.dumps(before | {"wall_seconds": 1000.0}))
    assert make(run, max_steps=4, eval_every=2, resume="auto").fit()["wall_seconds"] > 1000
    trainer = make(run, max_steps=4, eval_every=2, resume="2")
    trainer.log = trainer.run_dir.open_log(2)
    assert not file.exists()
    trainer.log.close()
    trainer.run_dir.close()
    make(run, max_steps=4, eval_every=2, resume="2").fit()
    assert strict_json(file.read_text())["wall_seconds"] is None


@pytest.mark.parametrize(
    "line",
    [
        attack(8, b'{"step": 1, "lo'),
        attack(25, DEEP.encode()),
        attack(29, b'{"step": 1, "x": "\xff"}', name="not UTF-8"),
        attack(29, b"[]", name="a list"),
        attack(29, b"{}", name="an empty object"),
        attack(29, b'{"step": "1"}', name="a step that is text"),
        attack(29, b"\x00\x00", name="zero bytes"),
    ],
)
def test_a_damaged_line_is_left_out_with_a_warning_and_the_rest_is_kept(
    run: Path, line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    file = run / "metrics.jsonl"
    _, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(line + b"\n" + b"".join(rest))
    make(run, max_steps=4, eval_every=2, resume="auto").fit()
    assert file.read_bytes() == b"".join(rest)
    said = capfd.readouterr().err
    assert said.count("metrics.jsonl, line 1: left out") == 1 and said.count("warning") == 1


def test_an_evaluation_that_is_no_number_is_left_out(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table at the end of the run would stumble on it, after all of the training."""
    file = run / "eval.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first.replace(b'"exact": ', b'"exact": "high", "was": ') + b"".join(rest))
    make(run, max_steps=4, eval_every=2, resume="auto").fit()
    assert file.read_bytes() == b"".join(rest)
    assert "eval.jsonl, line 1: left out ('exact' is no number)" in capfd.readouterr().err


def test_a_line_that_was_cut_off_when_the_process_died_is_nothing_to_warn_of(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    make(run, max_steps=4, eval_every=2, resume="auto").fit()
    assert [record["step"] for record in records(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "warning" not in capfd.readouterr().err


def test_evaluations_out_of_order_are_compared_in_order(run: Path) -> None:
    file = run / "eval.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[::-1]))
    log = RunLog(run, pytest.fail, start_step=4)
    log.close()
    assert [record["step"] for record in log.evaluated] == [0, 2, 4]


def test_a_resume_without_the_logs_of_the_steps_before_says_so(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its table compared two evaluations of the last steps as before and after all of them."""
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run / name).unlink()
    config = Config.of(**{**CHEAP, "max_steps": 6, "out_dir": str(run), "resume": "auto"})
    Trainer(config).fit()
    out, err = capfd.readouterr()
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert f"{name}: has nothing of the 4 steps before" in err.replace("\n", " ")
    assert "held-out examples after 4 and after 6 steps" in out


def test_a_resume_says_how_many_steps_its_log_lacks(run: Path) -> None:
    said: list[str] = []
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:1] + lines[2:]))
    RunLog(run, said.append, start_step=4).close()
    assert said == [f"{file}: has 3 of the 4 steps before the resume"]


def test_a_copy_made_of_hard_links_stays_as_it_is(run: Path) -> None:
    """As backups are made (cp -al): the logs of a run that went on grew in its backups, too."""
    backup = shutil.copytree(run, run.parent / "backup", copy_function=os.link)
    names = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    before = [(backup / name).read_bytes() for name in names]
    log = RunLog(run, pytest.fail, start_step=4)
    log.step(5, {"loss": 1.0})
    log.evaluation(5, {"n": 1.0})
    log.sample(5, {"completion": ""})
    log.close()
    assert [(backup / name).read_bytes() for name in names] == before
    assert [record["step"] for record in records(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_what_a_kill_left_of_a_file_may_be_part_of_a_copy_made_of_hard_links(
    tmp_path: Path,
) -> None:
    """After `cp -al` of a killed save, the second run to go on wrote into the other's file."""
    (tmp_path / "state.pt.tmp").write_text("half")
    os.link(tmp_path / "state.pt.tmp", tmp_path / "twin")
    write_whole(tmp_path / "state.pt", lambda aside: aside.write_text("whole"))
    assert (tmp_path / "state.pt").read_text() == "whole"
    assert (tmp_path / "twin").read_text() == "half"


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda text: "", "has no settings"),
        (lambda text: text[: text.index("[run]")], "is cut off"),
    ],
)
def test_a_resume_says_that_the_record_of_the_run_is_damaged_and_mends_it(
    run: Path, cut: Callable[[str], str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = (run / "config.toml").read_text()
    (run / "config.toml").write_text(cut(whole))
    make(run, max_steps=4, eval_every=2, resume="auto").fit()
    said = capfd.readouterr().err
    assert said.count("warning") == 1 and f"run/config.toml: {words}" in said.replace("\n", "")
    assert (run / "config.toml").read_text() == whole


def test_a_log_that_cannot_be_rewritten_stays_as_it_was(run: Path) -> None:
    """Attack 9: it was opened for writing, which emptied it, and rewritten in place."""
    before = (run / "metrics.jsonl").read_bytes()
    words = "metrics.jsonl: cannot be read and rewritten .File too large"
    with files_of_at_most(300), pytest.raises(ConfigError, match=words):
        RunLog(run, pytest.fail, start_step=2)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not list(run.glob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        attack(29, "metrics.jsonl", ": is not a file"),
        attack(27, "tensorboard", " in it is a file, not a folder"),
        attack(27, ".lock", ": cannot be written"),
        ("profile", " in it is a file, not a folder"),
        ("model.safetensors", " in it is a folder, not a file"),
        ("model.safetensors.tmp", " in it is a folder, not a file"),
        ("held_out.jsonl", " in it is a folder, not a file"),
        ("summary.json", " in it is a folder, not a file"),
        ("checkpoints/step_000006/state.pt", " is in the way of a checkpoint"),
    ],
)
def test_what_is_in_the_way_of_a_file_is_named_before_any_work(
    run: Path, name: str, words: str
) -> None:
    path = run / name
    if "file, not a folder" in words:
        shutil.rmtree(path, ignore_errors=True)
        path.write_text("in the way")
    else:
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{name}{words}") as error:
        make(run, max_steps=6, eval_every=2, resume="auto").fit()
    assert "\n" not in str(error.value)
    assert find_checkpoint(run / "checkpoints", "auto", str)["step"] == 4  # type: ignore[index]


# --- checkpoints ----------------------------------------------------------------------------------


def test_without_any_manifest_auto_is_an_error_as_long_as_there_are_states(run: Path) -> None:
    """Attack 2: it was a fresh start that overwrote them."""
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        make(run, max_steps=4, eval_every=2, resume="auto")
    assert len(list(run.glob("checkpoints/*/state.pt"))) == 2


def test_a_renamed_checkpoint_is_refused_and_nothing_is_removed(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000002")
    (run / "checkpoints" / "step_000004").rename(run / "checkpoints" / "step_000009")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        make(run, max_steps=12, resume="auto")
    assert (run / "checkpoints" / "step_000009" / "state.pt").exists()


def test_later_checkpoints_stay_until_the_resumed_run_has_saved(run: Path) -> None:
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    trainer = make(run, max_steps=4, eval_every=2, resume="2")
    with pytest.raises(ConfigError, match=r"config.toml: cannot be written"):
        trainer.fit()
    assert len(checkpoints(run / "checkpoints")) == 2
    (run / "config.toml").rmdir()
    make(run, max_steps=4, eval_every=2, resume="2", stop_after=3, save_every=9).fit()
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moves", range(5))
def test_a_resume_from_a_step_that_is_killed_leaves_no_gap_in_the_logs(
    run: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """The logs were cut before the later checkpoints were set aside, and --resume auto took those.

    Renamed are config.toml, a checkpoint, and three logs.
    """
    rename, replace, left = Path.rename, os.replace, [moves]

    def once_more() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *paths: once_more() or rename(*paths))
        patch.setattr(os, "replace", lambda *paths: once_more() or replace(*paths))
        trainer = make(run, max_steps=4, eval_every=2, resume="2", save_every=9)
        with pytest.raises(Killed):
            trainer.run_dir.open_log(2)
        trainer.run_dir.close()
    made = make(run, max_steps=4, eval_every=2, resume="auto")
    assert made.step == (4 if moves < 2 else 2)
    made.fit()
    assert [x["step"] for x in records(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [x["step"] for x in records(run / "eval.jsonl")] == [0, 2, 4]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]  # the abandoned one left with the next save


def test_a_resume_from_a_step_without_room_for_the_logs_changes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.jsonl was cut, samples.jsonl could not be, and the later checkpoints stayed."""
    write = log_files.write_aside

    def full(path: Path, content: Any) -> str:
        if path.name == "samples.jsonl":
            raise OSError(28, "No space left on device")
        return write(path, content)

    def files() -> dict[str, bytes]:
        there = (path for path in run.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in there}

    before = files()
    monkeypatch.setattr(log_files, "write_aside", full)
    with pytest.raises(
        ConfigError, match=r"samples.jsonl: cannot be read and rewritten \(No space"
    ):
        make(run, max_steps=4, eval_every=2, resume="2").fit()
    assert files() == before


def test_a_checkpoint_that_auto_cannot_read_is_kept_under_another_name(run: Path) -> None:
    (run / "checkpoints" / "step_000004" / "manifest.json").write_text("{}")
    make(run, max_steps=4, eval_every=2, resume="auto").fit()
    assert (run / "checkpoints" / "step_000004.unreadable" / "state.pt").exists()
    assert checkpoints(run / "checkpoints")[-1].name == "step_000004"


def test_an_old_checkpoint_that_cannot_be_removed_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(checkpoint, "remove", busy)
    said: list[str] = []
    save_checkpoint(tmp_path, 2, {"step": 2}, keep_last=1, warn=said.append)
    assert len(said) == 1 and "step_000001: an old checkpoint cannot be removed" in said[0]
    assert find_checkpoint(tmp_path, "auto", pytest.fail) == {"step": 2}


def test_a_model_without_checkpoints_is_not_started_over(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = (run / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds a model, .* but no checkpoint"):
        make(run, max_steps=1, resume="auto")
    assert (run / "model.safetensors").read_bytes() == before


def test_a_run_can_be_continued_with_its_own_config_after_it_was_stopped(tmp_path: Path) -> None:
    make(tmp_path / "run", max_steps=4, stop_after=2).fit()
    config = Config.from_toml(tmp_path / "run" / "config.toml")
    assert config.run.stop_after == 0 and config.run.max_steps == 4


def test_the_newest_checkpoint_of_a_run_is_the_model_to_start_from(run: Path) -> None:
    state = torch.load(run / "checkpoints" / "step_000004" / "state.pt", weights_only=True)
    state["model"] = {name: x + 1 for name, x in state["model"].items()}
    save_checkpoint(run / "checkpoints", 5, {**state, "step": 5}, keep_last=9)
    started = make(run.with_name("next"), init_from=str(run))
    assert torch.equal(started.model.wte.weight, state["model"]["wte.weight"])


@pytest.mark.parametrize(
    "name",
    [
        attack(5, "step_best"),
        attack(5, "step_000004.bak"),
        attack(5, "step_", name="no number"),
        attack(5, "step_2", name="no zeros"),
        attack(5, "step_00000²", name="a digit that is none"),
        attack(5, "step_-00001", name="negative"),
        attack(5, "old step_000002", name="more before it"),
    ],
)
def test_what_is_no_checkpoint_is_ignored_and_stays(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").touch()
    (tmp_path / f"{name}.txt").touch()
    save(tmp_path, 3, 4, keep_last=1)
    assert checkpoints(tmp_path) == [path_of(tmp_path, 4)]
    assert find_checkpoint(tmp_path, "auto", pytest.fail)["step"] == 4  # type: ignore[index]
    assert (tmp_path / name / "precious").exists()


def test_a_file_in_the_place_of_a_checkpoint_is_named_before_any_work(tmp_path: Path) -> None:
    """Attack 6."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000004").touch()
    with pytest.raises(ConfigError, match="step_000004 is in the way of a checkpoint"):
        make(tmp_path / "run")


@pytest.mark.parametrize(
    "left",
    [
        attack(10, "checkpoints"),
        attack(10, "metrics.jsonl"),
        attack(10, "samples.jsonl"),
        attack(10, "tensorboard"),
        attack(10, "model.safetensors", name="a model that the run would overwrite"),
    ],
)
def test_a_folder_holds_a_run_even_without_its_config(run: Path, left: str) -> None:
    for path in [path for path in run.iterdir() if path.name != left]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ConfigError, match=f"holds a run; --resume auto .*found: {left}"):
        make(run)
    assert [path.name for path in run.iterdir()] == [left]


@pytest.mark.parametrize(
    "manifest",
    [
        attack(25, DEEP),
        attack(25, "[]", name="a list"),
        attack(25, '{"files": 3}', name="no files"),
        attack(25, '{"format": "new"}', name="a format that is text"),
        attack(25, "\udcff", name="not UTF-8"),
    ],
)
def test_a_manifest_of_any_content_is_one_line(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1, 2)
    file = path_of(tmp_path, 2) / "manifest.json"
    file.write_bytes(manifest.encode(errors="surrogateescape"))
    said: list[str] = []
    assert find_checkpoint(tmp_path, "auto", said.append)["step"] == 1  # type: ignore[index]
    assert len(said) == 1 and "step_000002: not a whole checkpoint" in said[0]
    assert "\n" not in said[0]


def test_a_checkpoint_of_a_newer_format_is_refused_rather_than_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    file = path_of(tmp_path, 2) / "manifest.json"
    contents = strict_json(file.read_text())
    file.write_text(json.dumps(contents | {"format": contents["format"] + 1}))
    with pytest.raises(ValueError, match="step_000002: has format 2, written by a newer version"):
        find_checkpoint(tmp_path, "auto", pytest.fail)
    del contents["format"]  # as older versions wrote it
    file.write_text(json.dumps(contents))
    assert find_checkpoint(tmp_path, "auto", pytest.fail)["step"] == 2  # type: ignore[index]


# --- starting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        attack(26, "x" * 300, "cannot be written .File name too long"),
        attack(27, os.fsdecode(b"run\xff"), "must be printable text"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--out-dir .*{words}") as error:
        make_folder(Config.of(out_dir=str(tmp_path / name)))
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    assert not list(tmp_path.iterdir())


def test_a_step_that_is_not_there_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--resume 5: no such checkpoint .*there: none"):
        make_folder(Config.of(out_dir=str(tmp_path / "run"), resume="5"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [attack(40, "²"), attack(40, "٣"), attack(40, "-1")])
def test_a_step_is_ascii_digits(resume: str) -> None:
    with pytest.raises(ConfigError, match="--resume must be auto or a step number"):
        Config.of(out_dir="run", resume=resume)


@pytest.mark.parametrize("seconds", [attack(37, 1e300), attack(37, 1e-9), attack(37, float("nan"))])
def test_a_timeout_is_a_time_that_can_be_waited(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--pg-timeout must be at "):
        Config.of(pg_timeout=seconds)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        attack(37, {"WORLD_SIZE": "abc"}, "WORLD_SIZE must be a whole number from 1 .*'abc'"),
        attack(37, {"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1"),
        attack(37, {"WORLD_SIZE": "²"}, "WORLD_SIZE must be a whole number from 1"),
        attack(37, {"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be below WORLD_SIZE=2, got 2"),
        attack(37, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK must be"),
        attack(37, {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT must be"),
        attack(37, {"WORLD_SIZE": "1", "RANK": "0"}, "cannot join the other processes: .*MASTER_"),
    ],
)
def test_a_launchers_variables_are_checked(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as error:
        DistContext.from_env()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [attack(39, name) for name in ("train", "evaluate", "benchmark")])
def test_ctrl_c_while_a_command_starts_is_one_line_and_its_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    for start in (lambda: cli.main([name]), lambda: cli.run_script(name)):
        with pytest.raises(SystemExit) as stop:
            start()
        assert stop.value.code == 130
        assert capsys.readouterr().err == "interrupted\n"


# --- the screen -----------------------------------------------------------------------------------


def test_training_goes_on_when_nobody_reads_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Attack 7: `train.py | head -3`."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", os.fdopen(writer, "w"))
        summary = Trainer(Config.of(**CHEAP, out_dir=str(tmp_path / "run"))).fit()
        sys.stdout.close()  # flushes, as Python does at exit
    assert summary["status"] == "finished"
    said = capfd.readouterr().err
    assert said.count("nothing more is printed: stdout failed (Broken pipe)") == 1


@pytest.mark.parametrize(
    "text", [attack(11, "[/b]"), attack(11, "[bold]x"), attack(27, "\udcff", name="not UTF-8")]
)
def test_what_users_name_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.table(text, ["", text], [[text, text]])
    with screen.reading(text, 3) as read:
        read(3)
    screen.say(text)
    assert capsys.readouterr().out.count(text.replace("\udcff", "\\udcff")) == 5


def test_a_terminal_of_unknown_width_shows_what_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    screen = Screen()
    screen.say("found")
    screen.warn("odd")
    out, err = capsys.readouterr()
    assert out == "found\n" and "odd" in err


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_result_that_cannot_be_printed_is_an_error(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(sys, "stdout", Full())
    Screen().say("progress")
    with pytest.raises(ConfigError, match=f"^stdout: cannot be written .{os.strerror(code)}"):
        Screen(has_result=True).say("the result")


@pytest.mark.parametrize(
    ("change", "is_said"),
    [
        ("torch.set_default_dtype(torch.float64)", True),
        ("torch.use_deterministic_algorithms(True)", True),
        ("torch.set_grad_enabled(False)", False),  # of the reward's own thread only
    ],
)
def test_what_a_reward_changes_in_torch_does_not_change_the_training(
    change: str, is_said: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its training is that of a reward that changes nothing."""
    losses = {}
    for name, line in (("quiet", "pass"), ("loud", change)):
        file = tmp_path / f"{name}.py"
        file.write_text(
            "import minigrpo, torch\n"
            f"@minigrpo.reward()\ndef length(example, text):\n    {line}\n    return len(text)\n"
        )
        run = tmp_path / name
        make(run, rewards=str(file), reward_weights="length=1", parallel_rewards=False).fit()
        losses[name] = [record["loss"] for record in records(run / "metrics.jsonl")]
    assert losses["loud"] == losses["quiet"]
    said = capfd.readouterr().err
    assert said.count("for the whole run; undone after each batch") == is_said
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


# --- numbers that are not finite ------------------------------------------------------------------


def test_a_last_line_that_somebody_has_cut_is_not_joined_with_the_next(tmp_path: Path) -> None:
    """Both were lost, and the doctor could not read the file any more."""
    file = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, print, start_step=0)
    log.step(1, {"loss": 1.0})
    os.truncate(file, file.stat().st_size - 1)  # as an editor that ends a file without a break
    log.step(2, {"loss": 2.0})
    file.unlink()
    file.write_text('{"step": 1, "loss": 1.0}')
    log.step(3, {"loss": 3.0})
    log.step(4, {"loss": 4.0})
    log.close()
    assert [record["step"] for record in records(file)] == [1, 3, 4]


def test_a_step_that_makes_weights_infinite_ends_the_run_with_one_line_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attack 19."""
    settings = {**CHEAP, "learning_rate": 1e38, "warmup_steps": 0, "save_every": 1}
    argv = [f"--{name.replace('_', '-')}={x}" for name, x in settings.items() if x is not True]
    with pytest.raises(SystemExit) as stop:
        train.main([*argv, "--out-dir", str(tmp_path / "run")])
    line = str(stop.value.code)  # which Python prints, with exit code 1
    assert line.startswith("error: step 1: the update made weights that are not finite")
    assert "\n" not in line and "stay as they are" not in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.pt")) + list((tmp_path / "run").rglob("*.safet*"))
    assert strict_json((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_last_good_checkpoint_stays_when_a_later_step_spoils_the_weights(
    tmp_path: Path, iterations: int
) -> None:
    options: dict[str, Any] = {"save_every": 1, "num_iterations": iterations, "keep_last": 1}
    trainer = make(tmp_path / "run", **options)
    optimizer_step = trainer.learner.optimizer.step

    def spoiled(*args: Any, **kwargs: Any) -> None:
        optimizer_step(*args, **kwargs)
        if trainer.step == 2:
            with torch.no_grad():
                trainer.model.wte.weight[3, 4] = torch.nan

    trainer.learner.optimizer.step = spoiled  # type: ignore[method-assign,assignment]
    with pytest.raises(Diverged, match="step 3: the update made weights that are not finite"):
        trainer.fit()
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000002"]
    assert make(tmp_path / "run", **options, resume="auto").step == 2


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_value_that_is_not_finite_is_never_saved_and_never_loaded(
    run: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(run, max_steps=6, eval_every=2, resume="auto")
    learner = trainer.learner
    moments = learner.optimizer.state[learner.model.wte.weight]["exp_avg_sq"]
    with torch.no_grad():
        (learner.model.wte.weight if where == "model" else moments)[1, 2] = torch.inf
    names = "model.wte.weight" if where == "model" else "optimizer.state.*exp_avg_sq"
    for required in (True, False):
        with pytest.raises(NotFinite, match=f"step 5: not saved, because {names}"):
            trainer.run_dir.save(5, learner, required=required)
    assert not path_of(run / "checkpoints", 5).exists()
    monkeypatch.setattr("minigrpo.runtime.checkpoint.first_not_finite", lambda state: "")
    trainer.run_dir.save(5, learner)  # as an older version would have
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"{names}.* has values that are not finite"):
        find_checkpoint(run / "checkpoints", "5", pytest.fail)


def test_large_weights_whose_squares_overflow_are_finite(tmp_path: Path) -> None:
    large = {"model": {"w": torch.full((4,), 1e30)}, "step": 1}
    save_checkpoint(tmp_path, 1, large, keep_last=1)
    assert find_checkpoint(tmp_path, "1", pytest.fail) is not None
    trainer = make(tmp_path / "run")
    with torch.no_grad():
        trainer.model.wte.weight.fill_(1e30)
    check_weights(trainer.model, float(weight_norm(trainer.model)), 0, 0.1)


# --- the end --------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        attack(31, RuntimeError("out of luck"), RuntimeError),
        attack(31, None, AttributeError, name="returns None"),
        attack(4, "x" * 100_000, ConfigError, name="a prompt that is too long"),
        attack(13, Unprintable(), Unprintable, name="an exception without a text"),
    ],
)
def test_an_error_of_the_users_code_ends_the_run_with_what_is_done_saved(
    tmp_path: Path, fault: Any, kind: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path / "run", save_every=100)
    original = trainer.task.train

    def train_example(number: int) -> Example:
        if number // 4 < 3:
            return original(number)
        if isinstance(fault, Exception):
            raise fault
        return Example(fault, "1", index=number) if fault else fault

    trainer.source.examples.jobs.clear()  # type: ignore[attr-defined]
    trainer.task.train = train_example  # type: ignore[method-assign]
    with pytest.raises(kind):
        trainer.fit()
    assert "the run fails; its 3 steps are in" in capfd.readouterr().err
    assert strict_json((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    again = make(tmp_path / "run", save_every=100, resume="auto")
    assert again.step == 3
    again.run_dir.close()


def test_an_error_inside_an_update_saves_nothing_because_the_weights_are_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path / "run", save_every=100, num_iterations=2)
    gradient, calls = trainer.learner.gradient, [0]

    def fails_in_the_second_iteration(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise RuntimeError("out of luck")
        return gradient(*args)

    monkeypatch.setattr(trainer.learner, "gradient", fails_in_the_second_iteration)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit()
    assert not checkpoints(tmp_path / "run" / "checkpoints")


def test_weights_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").mkdir()
    with pytest.raises(RunFailed, match=r"model.safetensors: cannot be written \(Is a directory\)"):
        trainer.fit()
    assert find_checkpoint(tmp_path / "run" / "checkpoints", "auto", pytest.fail)["step"] == 6  # type: ignore[index]


@pytest.mark.parametrize(
    "changes", [attack(21, {"max_steps": 2}), attack(21, {"max_steps": 4, "stop_after": 3})]
)
def test_resuming_past_the_last_step_says_so(
    run: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(run, **changes, eval_every=2, resume="auto")
    name = "--stop-after 3" if "stop_after" in changes else "--max-steps 2"
    assert f"step 4 is past {name}: nothing is trained" in capfd.readouterr().err
    trainer.run_dir.close()


# --- losses ---------------------------------------------------------------------------------------

LOGP, ROWS = torch.zeros(2, 3, 4), torch.zeros(2, 3)
MASK = torch.ones(2, 3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        attack(20, {"kl": "k9", "kl_coef": 0.1}, "kl must be one of k2, .*got 'k9'"),
        attack(20, {"kl_coef": 0.1}, r"ref_logp must have the shape \[2, 3, 4\], got None"),
        attack(20, {"advantages": None}, r"advantages must have the shape \[2, 3\], got None"),
        attack(20, {"advantages": torch.zeros(3)}, r"advantages must .*\[2, 3\], got \[3\]"),
        attack(20, {"advantages": LOGP}, r"advantages must .*\[2, 3\], got \[2, 3, 4\]"),
        attack(20, {"mask": MASK[0, 0]}, r"mask must have the shape \[2, 3, 4\], got \[4\]"),
        attack(20, {"old_logp": LOGP[0, 0]}, r"old_logp must .*\[2, 3, 4\], got \[4\]"),
        attack(20, {"ref_logp": LOGP[:1]}, r"ref_logp must .*\[2, 3, 4\], got \[1, 3, 4\]"),
        attack(20, {"token_weights": LOGP[0]}, r"token_weights must .*got \[3, 4\]"),
        attack(48, {"loss": "ppo"}, "loss must be one of grpo, .*, got 'ppo'"),
        attack(48, {"logp": LOGP[..., :0]}, r"logp must be .*at least one column, got \[2, 3, 0\]"),
        attack(48, {"logp": torch.zeros(())}, r"logp must be .*at least one column, got \[\]"),
    ],
)
def test_a_loss_refuses_what_does_not_belong_together(changes: dict[str, Any], words: str) -> None:
    given = {"logp": LOGP, "old_logp": None, "advantages": ROWS, "mask": MASK, **changes}
    positional = [given.pop(name) for name in ("logp", "old_logp", "advantages", "mask")]
    with pytest.raises(ValueError, match=words):
        policy_loss(*positional, **given)


@pytest.mark.parametrize("shape", [(), (0,), (3, 1), (3, 0)])
def test_advantages_refuse_what_is_no_group(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="--group-size must be at least 2, got"):
        advantages(torch.zeros(shape))


def test_resuming_with_other_contents_of_a_file_is_said_once_with_flag_and_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, rewards, task = (tmp_path / name for name in ("d.jsonl", "r.py", "t.py"))
    data.write_text(Path(CHEAP["data"]).read_text())
    rewards.write_text("import minigrpo\n@minigrpo.reward()\ndef r(example, text): return 0.0\n")
    options: dict[str, Any] = {"data": str(data), "rewards": str(rewards), "max_steps": 2}
    make(tmp_path / "run", **options).fit()
    make(tmp_path / "run", **options, resume="auto").run_dir.close()
    arguments = [str(tmp_path / "run"), "--n", "2", "--device", "cpu"]
    evaluate.main(arguments)
    assert "other contents" not in capfd.readouterr().err
    named = ("--rewards", rewards), ("--data", data)
    then = {path: path.read_text() for _, path in named}
    for file in (data, rewards):
        file.write_text(file.read_text() + "\n")
        make(tmp_path / "run", **options, resume="auto").run_dir.close()
        said = [line for line in capfd.readouterr().err.splitlines() if "other contents" in line]
        assert len(said) == 1 and f"--data {data}" in said[0]
        assert (f"--rewards {rewards}" in said[0]) == (file is rewards)
        evaluate.main(arguments)
        err = "".join(capfd.readouterr().err.split())
        files = ", ".join(f"{by} {path}" for by, path in named if path.read_text() != then[path])
        expected = f"{files}: other contents than when {tmp_path / 'run'} was trained"
        assert "".join(expected.split()) in err
    task.write_text("x = 1")
    config = Config.of(task=str(task), out_dir="x")
    before = contents_of_files(config)
    task.write_text("x = 2")
    assert changed(contents_of_files(config), before) == [f"--task {task}"]
    task.unlink()
    os.mkfifo(task)
    assert contents_of_files(config) == {} and changed({}, before) == []


def test_resuming_with_other_contents_of_what_a_reward_file_imports_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rewards, helper = tmp_path / "r.py", tmp_path / "imported_by_r.py"
    helper.write_text("VALUE = 0.0")
    rewards.write_text(
        "import minigrpo\nfrom imported_by_r import VALUE\n"
        "@minigrpo.reward()\ndef r(example, text): return VALUE\n"
    )
    make(tmp_path / "run", rewards=str(rewards), max_steps=1).fit()
    for expected in ([], [f"--rewards {rewards}, imported_by_r.py"]):
        make(tmp_path / "run", rewards=str(rewards), max_steps=2, resume="auto").run_dir.close()
        err = " ".join(capfd.readouterr().err.split())
        assert [name for name in (f"--rewards {rewards}, imported_by_r.py",) if name in err] == (
            expected
        )
        assert ("other contents" in err) == bool(expected)
        helper.write_text("VALUE = 1.0")
    del sys.modules["imported_by_r"]


def test_resuming_with_another_tokenizer_under_the_same_name_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, found = tmp_path / "model", bpe.tokenizer_json([], "qwen")
    config = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}<|im_end|>"}
    options = {"tokenizer": str(folder), "max_steps": 2}

    def run(found: dict[str, Any], config: dict[str, Any], **files: Any) -> Trainer:
        shutil.rmtree(folder, ignore_errors=True)
        bpe.write_folder(folder, found, tokenizer_config=config, **files)
        load_tokenizer.cache_clear()
        return make(tmp_path / "run", **options, resume="auto")

    def refusal(*changed: Any, **files: Any) -> str:
        with pytest.raises(ConfigError) as error:
            run(*changed, **files)
        assert "\n" not in str(error.value)
        words = f"--resume: --tokenizer {folder} has changed since the checkpoint was written: "
        return str(error.value).removeprefix(words)

    run(found, config).fit()
    run(found, {**config, "padding_side": "left"}).run_dir.close()  # which changes no token
    swapped = json.loads(json.dumps(found))
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    assert refusal(swapped, config).startswith("another vocabulary; bring its files back, or")
    changed = {**config, "chat_template": "{{ messages[0].content }}!<|im_end|>"}
    assert refusal(found, changed).startswith("another chat template; ")
    ends = {"eos_token_id": [256, 258]}
    assert refusal(found, config, generation_config=ends).startswith("another set of ends; ")
    run(found, config).run_dir.close()  # the folder is unlocked, and nothing is lost
    state = load_checkpoint(path_of(tmp_path / "run" / "checkpoints", 2))
    del state["tokenizer"]  # as older versions wrote it
    save_checkpoint(tmp_path / "run" / "checkpoints", 3, {**state, "step": 3}, keep_last=9)
    run(swapped, config).run_dir.close()


# --- users' code and the process ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["between two steps", "in the gradient", "in an update"])
def test_a_second_signal_saves_the_steps_that_are_done_unless_an_update_is_under_way(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A task that hangs in `train` or `score_batch` leaves only the second signal."""
    trainer = make(tmp_path / "run", save_every=100)
    owner, name = {
        "between two steps": (trainer.source, "batch"),
        "in the gradient": (trainer.learner, "gradient"),
        "in an update": (trainer.learner.optimizer, "step"),
    }[where]
    saved, original = where != "in an update", getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(signals, "SAME_REQUEST", -1.0)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    said = capfd.readouterr().err
    assert "and saves the steps that are done, unless an update is under way" in said
    assert ("stopped; its 3 steps are in" in said) == saved
    found = find_checkpoint(tmp_path / "run" / "checkpoints", "auto", pytest.fail)
    assert (found["step"] if found else None) == (3 if saved else None)
    assert strict_json((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_rewards_that_fail_in_an_evaluation_are_said_with_their_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """eval.jsonl has their floor as if it were a score, and a run warns of a reward only once."""
    gone, mine = tmp_path / "gone", tmp_path / "mine.py"
    mine.write_text(
        "import minigrpo, pathlib\n@minigrpo.reward(success=True)\ndef right(example, text):\n"
        f"    if pathlib.Path({str(gone)!r}).exists():\n        raise OSError('no server')\n"
        "    return 1.0\n"
    )
    trainer = make(tmp_path / "run", max_steps=1, rewards=str(mine))
    one_step = trainer.one_step

    def step() -> None:
        gone.touch()
        one_step()

    trainer.one_step = step  # type: ignore[method-assign]
    trainer.fit()
    said = "reward right failed on 16 of 16 completions, which get its floor"
    assert f"evaluation at step 1: {said}" in (err := capfd.readouterr().err)
    assert "evaluation at step 0" not in err
    evaluate.main([str(tmp_path / "run"), "--n", "8"])
    assert f"warning: {said}" in " ".join(capfd.readouterr().err.split())


def test_a_success_that_is_neither_1_nor_0_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A graded reward as the success made every evaluation say that nothing is right."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import minigrpo\n@minigrpo.reward(success=True)\ndef near(example, text):\n"
        "    return 0.7\n"
    )
    assert make(tmp_path / "run", max_steps=1, rewards=str(mine)).fit()["status"] == "finished"
    said = "near says which completions are right, and was neither 1 nor 0 for 16 of 16"
    assert f"evaluation at step 0: {said}" in capfd.readouterr().err


def test_code_that_changes_the_current_folder_moves_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "mine.py").write_text(
        "import os, minigrpo\n@minigrpo.reward()\ndef moves(example, text):\n"
        f"    os.chdir({str(elsewhere)!r})\n    return 0.0\n"
    )
    monkeypatch.chdir(home)
    trainer = make(Path("run"), rewards="mine.py", save_every=2, profile=True)
    trainer.fit()
    assert Path.cwd() == home and not list(elsewhere.iterdir())
    assert capfd.readouterr().err.count("changes the current folder for the whole run; undone") == 1
    assert trainer.run_dir.dump(trainer.source.batch(0), 0).parent.parent == home / "run"  # type: ignore[union-attr]
    written = {path.name for path in (home / "run").iterdir()}
    assert {"checkpoints", "tensorboard", "profile", "bad_batches", "summary.json"} <= written
    assert len(checkpoints(home / "run" / "checkpoints")) == 2


@pytest.mark.parametrize("cwd", ["home", "removed"])
def test_a_relative_folder_is_where_the_run_was_started(
    tmp_path: Path, cwd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    start = working_folder()
    monkeypatch.chdir(tmp_path)
    if cwd == "home":
        assert make_folder(Config.of(out_dir="run"), start) == Path("run")
        (home / "run" / "config.toml").touch()
        with pytest.raises(ConfigError, match="^--out-dir run: holds a run"):
            make_folder(Config.of(out_dir="run"), start)
    else:
        monkeypatch.chdir(home)
        home.rmdir()
        assert working_folder() == Path()
        target = tmp_path / "run"
        assert make_folder(Config.of(out_dir=str(target)), working_folder()) == target
        monkeypatch.undo()


# --- what a second attack found -------------------------------------------------------------------


@pytest.mark.parametrize("save_every", [2, 100])
def test_a_folder_whose_checkpoints_were_deleted_is_not_started_over(
    run: Path, save_every: int
) -> None:
    """Its logs were replaced by those of the new run. Its own record says how often it saved."""
    shutil.rmtree(run / "checkpoints")
    (run / "model.safetensors").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="has metrics of 4 steps, but no checkpoint"):
        make(run, max_steps=4, eval_every=2, save_every=save_every, resume="auto")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_resume_with_another_rotary_base_is_refused(tmp_path: Path) -> None:
    """It changes what is computed, but no tensor."""
    model = Transformer(SHAPES["grouped-query"], seed=0)
    model.save_pretrained(tmp_path / "model.safetensors")
    shape = asdict(model.shape)
    check_same_shape(shape, shape)
    check_same_shape(shape, {name: x for name, x in shape.items() if name != "rope_theta"})
    with pytest.raises(ConfigError, match="rope_theta was 5.0, is 100.0; bring"):
        check_same_shape(shape, {**shape, "rope_theta": 5.0})


def test_a_resume_compares_the_shape_of_the_checkpoint(run: Path) -> None:
    resave(run, 4, lambda state: state["shape"].update(norm_eps=0.5))
    with pytest.raises(ConfigError, match="norm_eps was 0.5, is 1e-05"):
        make(run, max_steps=4, eval_every=2, resume="auto")


@pytest.mark.parametrize(
    "change",
    [
        {"guard": {"halvings": "y"}},
        {"guard": {"halvings": -1}},
        {"files": ["x"]},
        {"tokenizer": "x"},
        {"made_by": 7},
        {"config": {3: 4}},
        {"config": None},
        {"optimizer": None},
        {"model": torch.zeros(2)},
        {"shape": {"heads": torch.zeros(2)}},
    ],
    ids=repr,
)
def test_a_crafted_state_is_one_line(run: Path, change: dict[str, Any]) -> None:
    resave(run, 4, lambda state: state.update(change))
    with pytest.raises(CheckpointError):
        make(run, max_steps=4, eval_every=2, resume="4")


def test_a_tensor_without_values_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "first_not_finite", lambda state: "")
        model = {"w": torch.zeros(2, device="meta")}
        path = save_checkpoint(tmp_path, 1, {"step": 1, "model": model}, keep_last=9)
    with pytest.raises(CheckpointError, match="state.pt: cannot be loaded .* meta tensors"):
        load_checkpoint(path)


@pytest.fixture(scope="module")
def learner(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    """That of the run, after its four steps, to load crafted states into."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("learner") / "run")
    trainer = make(folder, max_steps=4, eval_every=2, resume="auto")
    trainer.run_dir.close()
    return trainer.learner


CRAFTED: dict[str, tuple[Sequence[str | int], Any, str]] = {  # place, value, words
    "halvings": (("guard", "halvings"), 99, "guard.halvings is 99, after 4 steps with 0 skipped"),
    "half": (("guard", "halvings"), 0.5, "guard.halvings is 0.5"),
    "skipped": (("guard", "skipped"), 5, "guard.skipped is 5, after 4 steps"),
    "below 0": (("guard", "in_a_row"), -1, "guard.in_a_row is -1"),
    "rate": (("optimizer", "param_groups", 0, "lr"), "fast", "param_groups.0.lr is 'fast'"),
    "betas": (("optimizer", "param_groups", 1, "betas"), ("a", "b"), "1.betas.0 is 'a'"),
    "other betas": (("optimizer", "param_groups", 0, "betas"), (0.1, 0.1), r"was \(0.1, 0.1\), is"),
    "decay": (("optimizer", "param_groups", 0, "weight_decay"), 7.0, "weight_decay was 7.0"),
    "a parameter twice": (("optimizer", "param_groups", 0, "params", 1), 0, "params was"),
    "no group": (("optimizer", "param_groups"), [], "has 2 groups of parameters, not 0"),
    "shape": (("optimizer", "state", 0, "exp_avg"), torch.zeros(3), r"exp_avg has the shape \[3\]"),
    "whole numbers": (("optimizer", "state", 1, "step"), torch.tensor(4), "step has the type"),
    "one number": (
        ("optimizer", "state", 0, "exp_avg"),
        torch.zeros(1, 1).expand(360, 16),
        r"exp_avg has the s.* not \[360, 16\]|exp_avg has the strides \[0, 0\]",
    ),
    "no tensor": (("optimizer", "state", 1, "exp_avg_sq"), 1.0, "exp_avg_sq is 1.0"),
    "another key": (("optimizer", "state", 0, "max_exp_avg_sq"), 1.0, "max_exp_avg_sq is unknown"),
    "another step": (("optimizer", "state", 1, "step"), torch.tensor(3.0), "has 3, 4 updates"),
    "no moments": (("optimizer", "state", 0), {}, "optimizer.state.0.* is missing"),
    "complex": (
        ("model", "wte.weight"),
        torch.zeros(2, 2, dtype=torch.cfloat),
        "no tensor of real",
    ),
    "not finite": (
        ("model", "wte.weight"),
        torch.full((2, 2), torch.nan),
        "wte.weight is not finite",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_state_is_compared_with_what_is_running(learner: Learner, name: str) -> None:
    """torch and the guard would take it, and train otherwise, not at all, or fail in an update."""
    state: Any = copy.deepcopy({**learner.state_dict(), "step": 4})
    learner.load_state_dict(state)
    *places, last = CRAFTED[name][0]
    inner = reduce(lambda value, place: value[place], places, state)
    inner[last] = CRAFTED[name][1]
    with pytest.raises((ValueError, RuntimeError), match=CRAFTED[name][2]):
        learner.load_state_dict(state)


def test_more_updates_than_steps_and_a_square_below_0_are_refused(learner: Learner) -> None:
    state: Any = copy.deepcopy({**learner.state_dict(), "step": 3})
    with pytest.raises(ValueError, match="optimizer.state has 4 updates, of at most 3"):
        learner.load_state_dict(state)
    state["optimizer"]["state"][0]["exp_avg_sq"][0] = -1
    with pytest.raises(ValueError, match="state.0.exp_avg_sq is below 0"):
        learner.load_state_dict({**state, "step": 4})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"examples": [Example("", "")]}, "examples must be those of 3 prompts, got 1"),
        ({"texts": [[]]}, "texts must be those of 3 prompts, got 1"),
        ({"loss_mask": torch.ones(1, 4, dtype=torch.bool)}, "loss_mask must have the shape .3, 4."),
        ({"loss_mask": torch.ones(3, 4)}, "loss_mask must be a tensor of torch.bool"),
        ({"advantages": torch.ones(3, 1)}, "advantages must have the shape .3, 4."),
        ({"old_logp": torch.ones(3, 4, 1)}, "old_logp must have the shape .3, 4, 9."),
    ],
)
def test_a_batch_whose_parts_do_not_fit_is_refused(
    learner: Learner, change: dict[str, Any], words: str
) -> None:
    """What broadcasts, or leaves prompts out, was learnt from without a word."""
    completions = make_completions(0)
    examples, texts = [Example("", "")] * 3, [[""] * 4] * 3
    batch = RolloutBatch(examples, completions, texts, advantages=torch.ones(3, 4))
    learner.prepare(batch)
    with pytest.raises(ValueError, match=words):
        learner.prepare(replace(batch, **change))


def test_what_a_task_changes_while_it_is_checked_is_undone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom minigrpo.types import Example\n"
        "class Mine:\n    parts = {'exact': 1.0}\n"
        "    def __init__(self, seed): pass\n"
        "    def train(self, number):\n"
        "        torch.set_autocast_enabled('cpu', True)\n"
        "        return Example('1+1=', '2', number)\n"
        "    held_out = train\n"
        "    def score(self, example, text): return {'exact': float(text == example.answer)}\n"
    )
    try:
        make(tmp_path / "run", task=str(tmp_path / "mine.py"), data="", reward_weights="")
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_weights_that_pay_nothing_are_refused_unless_something_else_teaches(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"reward_weights": "similarity=0", "max_steps": 1}
    with pytest.raises(ConfigError, match="--reward-weights: all weights are 0 .*nothing"):
        make(tmp_path / "run", **nothing)
    assert not (tmp_path / "run").exists()
    for number, other in enumerate(({"loss": "nll"}, {"overlong": "punish", "overlong_buffer": 2})):
        make(tmp_path / str(number), **nothing, **other).fit()


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_folder_that_goes_while_the_run_writes_to_it_ends_it_loudly_with_the_work_saved(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = tmp_path / "run", {"max_steps": 4, "save_every": 2}
    trainer = make(folder, **options)
    one_step = trainer.one_step

    def go() -> None:
        one_step()
        if trainer.step == 3:
            shutil.rmtree(folder) if way == "removed" else folder.rename(tmp_path / "other")

    monkeypatch.setattr(trainer, "one_step", go)
    with pytest.raises(RunFailed, match="was removed or renamed.* step 4 is saved there anew"):
        trainer.fit()
    (state,) = checkpoints(folder / "checkpoints")
    saved = load_checkpoint(state)["model"]
    assert all(torch.equal(saved[name], x) for name, x in trainer.model.state_dict().items())
    trainer = make(folder, **options, resume="auto")
    assert trainer.step == 4
    shutil.rmtree(folder)  # after the last save
    monkeypatch.setattr(trainer.run_dir, "save_weights", lambda model: None)
    with pytest.raises(RunFailed, match=r"was removed or renamed.*; so are the weights"):
        trainer._finish(0.0)


def test_a_file_of_a_run_that_its_user_deletes_does_not_end_it(run: Path) -> None:
    for name in (".lock", "eval.jsonl", "metrics.jsonl", "samples.jsonl"):
        (run / name).unlink()
        assert not said_gone(run)
    (run / "config.toml").unlink()
    assert said_gone(run)


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step_000004/new", "link/new"])
def test_nothing_is_written_among_checkpoints_which_are_removed_with_all_that_is_in_them(
    run: Path, place: str
) -> None:
    (run / "link").symlink_to("checkpoints/step_000004")
    with pytest.raises(ConfigError, match=f"--out-dir .*{place}: is among the checkpoints"):
        make(run / place)
    with pytest.raises(ConfigError, match="--out .*: is among the checkpoints of a run"):
        check_output_folder("--out", run / place)
    with pytest.raises(ConfigError, match="--json .*: is among the checkpoints of a run"):
        check_output_file("--json", run / place / "e.json")
    with pytest.raises(ConfigError, match="is a file of a run"):  # with another lock, two runs
        check_output_file("--json", run / ".lock")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_config.json"])
def test_a_run_is_not_written_over_a_model_in_shards_or_adapters(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"holds a model.*found: {name}"):
        make(tmp_path)


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_a_crafted_shape_that_computes_nan_is_refused(run: Path, value: float) -> None:
    resave(run, 4, lambda state: state["shape"].update(norm_eps=value))
    said: list[str] = []
    name, _ = load_model(str(run), said.append)
    assert "step_000002" in name and "norm_eps must be a number above 0" in said[0]
    with pytest.raises(ValueError, match="rope_theta must be a number at least 0, got inf"):
        replace(SHAPES["gpt2"], rope_theta=float("inf"))


def test_what_a_model_of_a_reward_computes_is_compared_at_a_resume(tmp_path: Path) -> None:
    """Its weights, its shape, which its config.json may change, and its tokenizer."""
    config, then, now = Config.of(), dict[str, str](), dict[str, str]()
    file, cpu = tmp_path / "judge.safetensors", torch.device("cpu")
    tokenizer = load_tokenizer("chess")
    shape = replace(SHAPES["grouped-query"], vocab_size=tokenizer.n_vocab)

    def load(digests: dict[str, str], shape: ModelShape, seed: int) -> str:
        Transformer(shape, seed=seed).save_pretrained(file)
        make_token_scoring(config, tokenizer, cpu, digests=digests).load(str(file))
        return other_contents(now, then)

    assert load(then, shape, seed=0) == "" and then
    assert load(now, shape, seed=0) == ""
    assert load(now, shape, seed=1).startswith(f"the model of a reward, {file}: other contents")
    assert "other contents" in load(now, replace(shape, rope_theta=50.0), seed=0)


def test_processes_that_find_other_files_refuse_to_train(tmp_path: Path) -> None:
    class Another(DistContext):
        """One of two processes; the other one's numbers are `other`."""

        other = 0

        def max(self, x: torch.Tensor) -> torch.Tensor:
            return torch.maximum(x, x.sign() * self.other if self.other else x)

    config, alone = Config.of(data=CHEAP["data"], out_dir="x"), Another()
    assert same_files(config, alone) == contents_of_files(config)
    alone.other = 1
    with pytest.raises(ConfigError, match="--data .*: not the same in all processes"):
        same_files(config, alone)


def test_resuming_an_earlier_step_says_what_it_abandons(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(run, max_steps=4, eval_every=2, resume="2").run_dir.close()
    assert "--resume 2 abandons the steps after it" in capfd.readouterr().err
    make(run, max_steps=4, eval_every=2, resume="4").run_dir.close()
    assert "abandons" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["eval.jsonl", "samples.jsonl", "summary.json", "config.toml"])
def test_auto_never_replaces_a_file_that_no_run_wrote(tmp_path: Path, name: str) -> None:
    """A data file named eval.jsonl was emptied, without a word."""
    folder, contents = tmp_path / "mine", "[run]\nmax_steps = 2\n"
    folder.mkdir()
    (folder / name).write_text(contents)
    with pytest.raises(ConfigError, match=f"--resume auto: .* {name} that no run wrote"):
        make(folder, resume="auto").fit()
    assert (folder / name).read_text() == contents


def test_auto_continues_a_run_that_was_killed_before_its_first_save(tmp_path: Path) -> None:
    make(tmp_path / "run", max_steps=2).fit()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for name in ("model.safetensors", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    trainer = make(tmp_path / "run", max_steps=2, resume="auto")
    assert trainer.step == 0
    trainer.run_dir.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "samples.jsonl"])
def test_auto_never_replaces_the_logs_of_another_job_that_was_killed_before_its_first_save(
    run: Path, name: str
) -> None:
    shutil.rmtree(run / "checkpoints")
    for file in run.glob("*"):
        if file.name not in ("config.toml", name) and file.is_file():
            file.unlink()
    content = (run / name).read_bytes()
    options = {"max_steps": 4, "eval_every": 2, "save_every": 9, "resume": "auto"}
    for changes, said in (
        ({"learning_rate": 7e-4}, "--learning-rate was .*, is 0.0007"),
        ({"seed": 7}, "--seed was 0, is 7"),
        ({"loss": "dapo"}, "--loss was 'grpo', is 'dapo'"),
    ):
        with pytest.raises(ConfigError, match=f"made with another config: .*{said}"):
            make(run, **{**options, **changes}).fit()
        assert (run / name).read_bytes() == content
    (run / name).write_bytes(b"")  # nothing is lost
    make(run, **options, learning_rate=7e-4).run_dir.close()


def test_a_folder_stays_locked_when_its_user_deletes_the_file_of_the_lock(tmp_path: Path) -> None:
    """Two runs wrote into one folder."""
    first = make(tmp_path / "run", max_steps=1)
    (tmp_path / "run" / ".lock").unlink()
    for _ in range(2):  # the second finds a new file
        with pytest.raises(ConfigError, match="another run is writing to it"):
            make(tmp_path / "run", max_steps=1, resume="auto")
    first.run_dir.close()
    make(tmp_path / "run", max_steps=1, resume="auto").run_dir.close()


@pytest.mark.parametrize("max_steps", [4, 2])
def test_a_run_that_ends_where_it_resumes_is_evaluated_on_all_examples(
    tmp_path: Path, max_steps: int
) -> None:
    """Its last evaluation was the one during the run, and was compared with a larger first one."""
    options = {"eval_size": 8, "eval_size_during": 4, "eval_every": 2}
    make(tmp_path / "run", max_steps=8, stop_after=4, **options).fit()
    for _ in range(2):  # it is not evaluated twice
        summary = make(tmp_path / "run", max_steps=max_steps, resume="auto", **options).fit()
        found = [(x["step"], x["n"]) for x in records(tmp_path / "run" / "eval.jsonl")]
        assert found == [(0, 8), (2, 4), (4, 8)] and summary["last_evaluation"]["n"] == 8
        answers = records(tmp_path / "run" / "held_out.jsonl")
        assert len(answers) == 8 and {x["step"] for x in answers} == {4}


def test_a_finished_run_is_evaluated_again_where_another_size_is_asked_for(tmp_path: Path) -> None:
    """The evaluation of the old size stayed, and config.toml named the new one."""
    make(tmp_path / "run", max_steps=1, eval_size=8).fit()
    for asked, found in ((12, 12), (4, 4), (99, 9)):  # of the last one there are only 9
        for is_new in (True, False):
            trainer = make(tmp_path / "run", max_steps=1, eval_size=asked, resume="auto")
            trainer.task.num_held_out = max(found, 9)  # type: ignore[attr-defined]
            trainer.fit()
            sizes = [(x["step"], x["n"]) for x in records(tmp_path / "run" / "eval.jsonl")]
            assert sizes == [(0, 8), (1, found)]
            assert len(records(tmp_path / "run" / "held_out.jsonl")) == found
            assert (1 in trainer.intervals) is is_new  # it is not evaluated twice


def test_a_finished_run_is_evaluated_again_where_other_samples_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old evaluation stayed. It was removed first, and lost if the new one did not end."""

    def interrupted(*parts: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "run" / "eval.jsonl"
    make(tmp_path / "run", max_steps=1, eval_size=8).fit()
    before = file.read_bytes()
    options = {"max_steps": 1, "eval_size": 8, "eval_samples": 4, "resume": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr("minigrpo.trainer.measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "run", **options).fit()
    assert file.read_bytes() == before
    for is_new in (True, False):
        trainer = make(tmp_path / "run", **options)
        trainer.fit()
        found = records(file)
        assert [(x["step"], x["n"], "pass@4" in x) for x in found] == [(0, 8, False), (1, 8, True)]
        assert (1 in trainer.intervals) is is_new


def test_an_evaluation_is_written_anew_also_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it follows the old one, and the last one counts."""

    def full(path: Path, write: Any) -> None:
        raise OSError(28, "No space left on device")

    log = RunLog(tmp_path, pytest.fail, start_step=0)
    for value in (0.0, 1.0, 2.0):
        log.evaluation(1, {"a": value})
        log.evaluation(2, {"a": value})
        if value:
            monkeypatch.setattr(log_files, "write_whole", full)
    log.close()
    found = [(x["step"], x["a"]) for x in records(tmp_path / "eval.jsonl")]
    assert found == [(1, 1.0), (2, 1.0), (1, 2.0), (2, 2.0)]
    again = RunLog(tmp_path, print, start_step=2)  # which warns that there are no metrics
    again.close()
    assert again.evaluated[-1] == {"step": 2, "a": 2.0}


@pytest.mark.parametrize("name", ["job_summary.txt", "adapter_config.json"])
def test_auto_replaces_no_file_that_no_run_wrote(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("my own notes")
    with pytest.raises(ConfigError, match=rf"no checkpoint, and {name} that no run wrote"):
        make(tmp_path / "run", resume="auto")


def test_an_evaluation_that_was_stopped_is_made_by_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal in it saved the step, and the curve lacked it for good."""
    options = {"max_steps": 6, "eval_every": 2, "eval_size": 8, "eval_size_during": 4}
    original, left = trainer_module.measure, [2]

    def stopped(*parts: Any, **asked: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*parts, **asked)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "measure", stopped)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "stopped", **options).fit()
    resumed = make(tmp_path / "stopped", **options, resume="auto")
    assert resumed.step == 4
    resumed.fit()
    make(tmp_path / "calm", **options).fit()
    for name in ("eval", "samples", "held_out"):
        calm, found = (records(tmp_path / x / f"{name}.jsonl") for x in ("calm", "stopped"))
        assert found == calm
    assert [x["step"] for x in records(tmp_path / "calm" / "eval.jsonl")] == [0, 2, 4, 6]


@pytest.mark.parametrize("recorded", [True, False])
def test_an_evaluation_counts_once_its_answers_are_written(
    tmp_path: Path, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in between, held_out.jsonl kept the answers of another evaluation.

    After one before its record, its samples were logged twice.
    """
    run, options = tmp_path / "run", {"max_steps": 1, "eval_size": 8}
    with monkeypatch.context() as patch:
        original, left = RunLog.evaluation, [1]

        def killed(log: RunLog, step: int, values: Any) -> None:
            left[0] -= 1
            if recorded or left[0] >= 0:
                original(log, step, values)
            if left[0] < 0:
                raise Killed

        patch.setattr(RunLog, "evaluation", killed)
        with pytest.raises(Killed):
            make(run, **options).fit()
    make(run, **options, resume="auto").fit()
    assert {x["step"] for x in records(run / "held_out.jsonl")} == {1}
    assert [x["step"] for x in records(run / "eval.jsonl")] == [0, 1]
    logged = [(x["step"], x["index"], x["decoding"]) for x in records(run / "samples.jsonl")]
    assert len(logged) == len(set(logged)) == 2 * 8 * 2


@pytest.mark.parametrize("name", ["job_summary.txt", "track_id"])
def test_a_folder_with_a_file_that_a_run_would_overwrite_holds_a_run(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("my own notes")
    with pytest.raises(ConfigError, match=rf"holds a run; .* \(found: {name}\)"):
        make(tmp_path / "run")


def test_auto_never_removes_checkpoints_of_another_program(tmp_path: Path) -> None:
    """They have no state.pt, so each looked like a save that a kill had interrupted."""
    others = [tmp_path / "run" / "checkpoints" / f"step_000{n}00" for n in (1, 2, 3)]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "model.pt").write_text("work")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole; take another"):
        make(tmp_path / "run", max_steps=1, keep_last=1, resume="auto").fit()
    assert all((folder / "model.pt").exists() for folder in others)


def test_no_folder_is_named_like_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ~ alone in --out-dir=~/runs, and `rm -r ~` is what one types then."""
    monkeypatch.chdir(tmp_path)
    for refuse in (
        lambda: make_folder(Config.of(out_dir="~/runs")),
        lambda: check_output_folder("--out", "~/x"),
        lambda: check_output_file("--json", Path("~/x.json")),
    ):
        with pytest.raises(ConfigError, match="would be a folder named ~"):
            refuse()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(("before", "reason"), [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")])
def test_a_terminal_that_closes_asks_to_stop_unless_nohup_ignores_it(
    before: signal.Handlers, reason: str
) -> None:
    """All steps since the last checkpoint were lost."""
    own = signal.signal(signal.SIGHUP, before)
    try:
        with signals.StopRequest(lambda text: None) as request:
            signal.raise_signal(signal.SIGHUP)
            assert request.reason == reason
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, own)


def test_the_record_is_utf8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under LANG=en_US, which is Latin-1, no tool could read the run."""
    write = Path.write_text

    def in_latin_1(path: Path, text: str, encoding: str | None = None) -> int:
        return write(path, text, encoding or "latin-1")

    monkeypatch.setattr(Path, "write_text", in_latin_1)
    data = tmp_path / "fälle.jsonl"
    shutil.copy(CHEAP["data"], data)
    trainer = make(tmp_path / "run", data=str(data))
    trainer.run_dir.open_log(0).close()
    trainer.run_dir.close()
    assert read_record(Config, tmp_path / "run")["data"] == str(data)


def test_a_log_that_is_replaced_or_removed_during_the_run_goes_on_in_the_new_file(
    tmp_path: Path,
) -> None:
    """Lines went to the file that an editor had replaced, and were lost."""
    said: list[str] = []
    folder = tmp_path / "run"
    log = RunLog(folder, said.append, start_step=0)
    log.step(1, {"loss": 1.0})
    edited = folder / "edited"
    shutil.copy(folder / "metrics.jsonl", edited)
    edited.replace(folder / "metrics.jsonl")
    log.step(2, {"loss": 1.0})
    assert [record["step"] for record in records(folder / "metrics.jsonl")] == [1, 2]
    assert len(said) == 1 and "metrics.jsonl: was removed or replaced during the run" in said[0]
    shutil.rmtree(folder)
    log.step(3, {"loss": 1.0})
    assert len(said) == 2 and "NOT WRITTEN (No such file or directory)" in said[1]
    (folder / "tensorboard").mkdir(parents=True)
    log.close()
    assert [record["step"] for record in records(folder / "metrics.jsonl")] == [3]

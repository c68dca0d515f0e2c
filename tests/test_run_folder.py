"""A run's folder as a state machine: whatever happens to it, a resumed run has the same bits.

The learner is a pretended one of a few numbers, so that hundreds of runs take seconds.
test_resume.py does the same with real processes.
"""

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minigrpo import userfiles
from minigrpo.checkpoint import checkpoints, load_checkpoint, newest, save_checkpoint, write_text
from minigrpo.config import Config
from minigrpo.errors import RunFailed
from minigrpo.model.source import RunRecord
from minigrpo.rng import stream
from minigrpo.run import logging
from minigrpo.run.console import Console
from minigrpo.run.logging import read_jsonl
from minigrpo.run.run_dir import RunDir, choose_folder
from minigrpo.runtime.distributed import DistContext
from minigrpo.types import ConfigError
from minigrpo.userfiles import load_file

from .test_tools import contents
from .tiny import read_json, refused

LAST = 40  # steps of an undisturbed run
FACTS = {"tokenizer": "abc", "shape": {"width": 3}}
FOREIGN = {"notes.txt": "mine", "checkpoints/step_best/state.pt": "mine", "checkpoints/a.bin": "x"}


class Learner:
    """Weights and moments that depend on all steps so far."""

    def __init__(self) -> None:
        self.step = 0
        self.weight = torch.arange(300) / 7
        self.moment = torch.zeros(300)

    def learn(self) -> None:
        draws = stream(0, "gradient", self.step).random(300, dtype=np.float32)
        self.moment = 0.9 * self.moment + torch.from_numpy(draws) * self.weight.sin()
        self.weight = self.weight - 0.1 * self.moment
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        moments = {"state": {0: {"exp_avg": self.moment, "step": torch.tensor(1.0)}}, "lr": 0.1}
        return {"step": self.step, "model": {"w": self.weight}, "optimizer": moments}

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.weight = state["model"]["w"]
        self.moment = state["optimizer"]["state"][0]["exp_avg"]

    @property
    def bits(self) -> bytes:
        return self.weight.numpy().tobytes() + self.moment.numpy().tobytes()


def undisturbed() -> list[bytes]:
    learner = Learner()
    bits = []
    for _ in range(LAST + 1):
        bits.append(learner.bits)
        learner.learn()
    return bits


BITS = undisturbed()


class Run:
    """What the trainer does with the folder."""

    def __init__(self, folder: Path, resume: str = "auto", **changes: Any) -> None:
        settings = {"save_every": 99, "keep_last": 2, "resume": resume, "out_dir": str(folder)}
        self.config = Config.of(**settings | changes)
        self.learner = Learner()
        self.said = []
        self.console = Console(quiet=True)
        self.console.warn = self.said.append  # type: ignore[method-assign]
        self.folder = choose_folder(self.config, DistContext())

    def start(self, checksums: Mapping[str, str] = {}, **facts: Any) -> "Run":
        self.run_dir = RunDir(
            self.folder,
            self.config,
            DistContext(),
            self.console,
            {**FACTS, **facts},
            dict(checksums),
        )
        self.run_dir.open(self.learner.load)
        self.log = self.run_dir.open_log(self.learner.state_dict())
        return self

    @property
    def step(self) -> int:
        return self.learner.step

    def train(self, steps: int = 1) -> "Run":
        for _ in range(steps):
            self.learner.learn()
            self.log.step(self.step, {"loss": float(self.learner.weight.sum())})
        return self

    def save(self, *, required: bool = True) -> "Run":
        self.run_dir.save(self.learner.state_dict(), required=required)
        return self

    def die(self) -> None:
        """What the system does when a process ends."""
        self.run_dir.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "SummaryWriter", MagicMock())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# --- what may happen ------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is dead: nothing that it would do afterwards happens."""


CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir")


@contextmanager
def death(folder: Path, at: int) -> Iterator[list[int]]:
    """Kill the process before its `at`-th call that changes the disk; what was not flushed is cut.

    The block may also end before that: what it gets is the number of calls.
    """
    originals = {name: getattr(os, name) for name in CALLS}
    calls = [0]

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] >= at:
                raise Killed
            return originals[name](*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(name))
        with suppress(Killed):
            yield calls
    if calls[0] >= at:
        for file in folder.rglob("*"):
            if ".partial_" in str(file) and file.is_file():
                os.truncate(file, file.stat().st_size * (at % 3) // 2)
        for log in folder.glob("metrics.jsonl"):  # in the middle of a line
            log.write_bytes(log.read_bytes() + b'{"step": 9, "lo')


@contextmanager
def full_disk(folder: Path, after: int) -> Iterator[None]:
    """No room from the `after`-th flush on, until a checkpoint is removed."""
    fsync = os.fsync
    before = len(checkpoints(folder))
    calls = 0

    def flush(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if len(checkpoints(folder)) < before:
            calls = -100
        if calls >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        yield


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "delete" or not data:
        file.unlink()
    elif how == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        os.truncate(file, len(data) // 2)


def whole(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole, found without the library."""
    found = []
    for path in (folder / "checkpoints").glob("step_0*"):
        try:
            promised = read_json(path / "manifest.json")["files"]["state.pt"]
            digest = hashlib.sha256((path / "state.pt").read_bytes()).hexdigest()
        except (OSError, ValueError):
            continue
        if promised == digest:
            found.append(int(path.name[5:]))
    return sorted(found)


class Folder(RuleBasedStateMachine):
    """Steps, saves, kills, full disks, damage, resumes and branches, in any order."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.number = 0
        self.run = None
        self.new_folder()
        self.start()

    def new_folder(self) -> None:
        self.number += 1
        self.folder = self.root / f"run_{self.number}"
        self.harmed = set()  # parts of it that somebody has damaged
        for name, text in FOREIGN.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.end()
            shutil.rmtree(self.root)

    def end(self) -> None:
        if self.run:
            self.run.die()
        self.run = None

    def start(self) -> None:
        """`--resume auto`: from the newest whole checkpoint, and never afresh over saved work."""
        there = whole(self.folder)
        saved = checkpoints(self.folder / "checkpoints")
        try:
            self.run = Run(self.folder).start()
        except ConfigError:
            assert not there and self.harmed  # only damage may stop a run
            self.new_folder()
            self.run = Run(self.folder).start()
            return
        assert self.run.step == (there[-1] if there else 0)
        assert there or not saved
        logged = [record["step"] for record in read_jsonl(self.folder / "metrics.jsonl")]
        if "metrics.jsonl" not in self.harmed:
            assert logged == list(range(1, self.run.step + 1))

    @precondition(lambda self: self.run)
    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        self.run.train(min(steps, LAST - self.run.step))

    @precondition(lambda self: self.run)
    @rule()
    def save(self) -> None:
        self.run.save()
        self.harmed -= {f"step_{self.run.step:06d}"}

    @precondition(lambda self: self.run)
    @rule(after=st.integers(1, 6))
    def save_without_room(self, after: int) -> None:
        """A full disk warns, keeps older checkpoints, and leaves nothing partial."""
        before = whole(self.folder)
        partial = {*self.folder.rglob(".partial_*")}  # of a kill
        with full_disk(self.folder / "checkpoints", after):
            self.run.save(required=False)
        assert not before or whole(self.folder)
        assert self.run.step in before or {*self.folder.rglob(".partial_*")} <= partial

    @precondition(lambda self: self.run)
    @rule(at=st.integers(1, 20))
    def die_in_a_save(self, at: int) -> None:
        before = whole(self.folder)
        with death(self.folder, at):
            self.run.save()
        self.end()
        assert not before or whole(self.folder)

    @precondition(lambda self: not self.run)
    @rule(at=st.integers(1, 30), anew=st.booleans())
    def die_in_a_start(self, at: int, anew: bool) -> None:
        if anew:
            self.new_folder()
        before = whole(self.folder)
        run = Run(self.folder)
        with death(self.folder, at):
            try:
                run.start()
            except ConfigError:
                assert not before and self.harmed
        run.die()
        assert whole(self.folder) == before or whole(self.folder) == [0]

    @rule()
    def stop_or_resume(self) -> None:
        if self.run:
            self.end()
        else:
            self.start()

    @precondition(lambda self: not self.run)
    @rule(which=st.integers(0, 100), how=st.sampled_from(["truncate", "flip", "delete"]))
    def harm(self, which: int, how: str) -> None:
        """Damage any file of the run, one of each checkpoint at most."""
        spared = {".lock", *FOREIGN}
        files = [
            file
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
            and str(file.relative_to(self.folder)) not in spared
            and {file.name, file.parent.name}.isdisjoint(self.harmed)
        ]
        if files:
            file = files[which % len(files)]
            of_checkpoint = file.parent.name.startswith("step_")
            self.harmed.add(file.parent.name if of_checkpoint else file.name)
            # JSON with a flipped bit may still be JSON, with another key
            damage(file, "truncate" if file.suffix == ".jsonl" and how == "flip" else how)

    @precondition(lambda self: not self.run and whole(self.folder))
    @rule(at=st.integers(1, 30), which=st.integers(0, 9), by_step=st.booleans())
    def branch(self, at: int, which: int, by_step: bool) -> None:
        """Go on from a checkpoint in another folder, with a kill on the way; nothing here moves."""
        steps = whole(self.folder)
        old = self.folder
        before = contents(old)
        step = steps[which % len(steps)] if by_step else steps[-1]
        source = old / "checkpoints" / f"step_{step:06d}" if by_step else old
        logs_are_whole = "metrics.jsonl" not in self.harmed
        self.new_folder()
        self.run = Run(self.folder, str(source))
        with death(self.folder, at) as calls:
            self.run.start()
        self.end()
        assert contents(old) == before
        if calls[0] >= at or not logs_are_whole:  # killed before the lines of before were copied
            self.harmed.add("metrics.jsonl")
        if whole(self.folder) == [step]:
            self.start()
        else:  # killed before the copy was whole: type it again
            self.run = Run(self.folder, str(source)).start()

    @invariant()
    def same_bits_and_foreign_files(self) -> None:
        if getattr(self, "run", None):
            assert self.run.learner.bits == BITS[self.run.step]
        if hasattr(self, "folder"):
            assert all((self.folder / x).read_text() == text for x, text in FOREIGN.items())


Folder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_folder_under_any_treatment_has_the_bits_of_an_undisturbed_run() -> None:
    Folder.TestCase("runTest").runTest()


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    save_checkpoint(tmp_path, {"step": 1})
    (path,) = checkpoints(tmp_path)
    evil = pickle.dumps({"model": Evil()}, protocol=2)
    (path / "state.pt").write_bytes(evil)
    digest = hashlib.sha256(evil).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"files": {"state.pt": digest}}))
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "bad",
    [
        {0: [torch.ones(2), torch.tensor([1.0, np.nan])]},
        float("inf"),
        torch.full((2, 2), -np.inf, dtype=torch.bfloat16),
    ],
)
def test_what_is_not_finite_is_never_saved(tmp_path: Path, bad: Any) -> None:
    """Numbers whose squares overflow are finite."""
    good = {"step": 1, "a": torch.full((9,), 3e38), "b": torch.empty(0), "c": torch.tensor([1])}
    with pytest.raises(ValueError):
        save_checkpoint(tmp_path, {**good, "bad": bad})
    assert not any(tmp_path.iterdir())
    save_checkpoint(tmp_path, good)
    assert len(checkpoints(tmp_path)) == 1


def test_contents_are_flushed_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may keep a rename and lose what was written before it."""
    flushed, replace = set(), os.replace

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        flushed.add((found.st_ino, found.st_size, found.st_mtime_ns))

    def checked(source: Path, target: Path) -> None:
        for file in [source] if source.is_file() else source.rglob("*"):
            found = file.stat()
            assert (found.st_ino, found.st_size, found.st_mtime_ns) in flushed, file
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", checked)
    save_checkpoint(tmp_path, {"step": 1})
    write_text(tmp_path / "config.toml", "a = 1")
    assert len(flushed) == 3


def test_without_room_the_older_of_two_is_given_up_and_the_last_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_checkpoint(folder, {"step": step}, keep_last=9)
    with full_disk(folder, after=1):
        save_checkpoint(folder, {"step": 3}, keep_last=9)
    assert [path.name for path in checkpoints(folder)] == ["step_000002", "step_000003"]
    damage(folder / "step_000003" / "state.pt", "flip")
    with (
        full_disk(folder, after=1),
        pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC),
    ):
        save_checkpoint(folder, {"step": 4}, keep_last=9)
    assert newest(tmp_path, lambda text: None).name == "step_000002"


# --- starting and resuming ------------------------------------------------------------------------


def started(folder: Path, resume: str = "auto", **changes: Any) -> Run:
    return Run(folder, resume, **changes).start()


def finished(folder: Path, steps: int = 3, **changes: Any) -> Run:
    run = Run(folder, **changes).start().train(steps).save()
    run.run_dir.write_summary({"step": steps})
    run.die()
    return run


@pytest.mark.parametrize(
    "left", ["config.toml", "metrics.jsonl", "checkpoints", "model.safetensors"]
)
def test_a_run_is_not_started_over_another(tmp_path: Path, left: str) -> None:
    finished(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_text("weights")
    for path in (tmp_path / "run").iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted(tmp_path.rglob("*"))
    for resume in ("", str(finished(tmp_path / "other").folder)):
        refused(started, tmp_path / "run", resume)
    if left != "checkpoints":  # the checkpoints are gone
        refused(started, tmp_path / "run")
    assert {*before} <= {*tmp_path.rglob("*")}
    (tmp_path / "of TRL" / "checkpoint-10").mkdir(parents=True)
    refused(started, tmp_path / "of TRL")


def test_settings_of_another_run_are_refused_and_those_that_may_change_are_said(
    tmp_path: Path,
) -> None:
    finished(tmp_path / "run")
    refused(started, tmp_path / "run", seed=1)
    refused(started, tmp_path / "run", reward_weights={"similarity": 1.0})
    allowed = {"max_steps": 99, "keep_last": 5, "use_amp": True, "micro_batch_size": 2}
    again = Run(tmp_path / "run", **allowed).start()  # the lock is free
    again.die()
    assert again.step == 3
    assert len(again.said) == len(allowed)
    silent = Run(tmp_path / "run", stop_after=3).start()
    assert not silent.said


def test_other_facts_are_refused_and_other_files_are_warned_of(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("one")
    options = {"task": "prompts", "data": str(data)}
    finished(tmp_path / "run", **options)
    refused(Run(tmp_path / "run", **options).start, tokenizer="another")
    same = Run(tmp_path / "run", **options).start()
    same.die()
    assert not same.said
    data.write_text("two")
    other = Run(tmp_path / "run", **options).start()
    assert any(str(data) in text for text in other.said)
    record = (tmp_path / "run" / "config.toml").read_text()
    assert hashlib.sha256(b"two").hexdigest() in record
    assert torch.__version__ in record
    assert Config.from_toml(tmp_path / "run" / "config.toml").task == other.config.task


def test_a_model_with_other_weights_is_refused_also_if_it_is_asked_later(tmp_path: Path) -> None:
    """`checksums`: by `record_checksum`; a reward asks for its models when it is first called."""
    run = Run(tmp_path / "run").start(checksums={"--model base": "a"})
    run.run_dir.checksums["judge"] = "b"
    run.train().save().die()
    for same in ({"--model base": "a"}, {"--model base": "a", "judge": "b"}):
        again = Run(tmp_path / "run").start(checksums=same)
        again.die()
        assert again.run_dir.checksums == {"--model base": "a", "judge": "b"}
        assert not again.said
    record = RunRecord.read(tmp_path / "run")
    assert record and record.versions.items() >= again.run_dir.checksums.items()
    for other in ({"--model base": "x"}, {"--model base": "a", "judge": "x"}):
        refused(Run(tmp_path / "run").start, checksums=other)


def test_code_that_has_changed_is_named_and_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside the users' too, and one that was imported later; `_read` is of a process."""
    users_file = tmp_path / "uses_the_helper.py"
    helper = tmp_path / "helper_of_a_run.py"
    later = tmp_path / "imported_later.py"
    users_file.write_text("from helper_of_a_run import LIMIT\n")
    helper.write_text("LIMIT = 3\n")
    later.write_text("LIMIT = 3\n")
    monkeypatch.setattr(userfiles, "_read", {})  # without files of other tests
    load_file(users_file)
    run = Run(tmp_path / "run").start()
    load_file(later)
    run.train().save().die()
    del userfiles._read[str(later)]
    later.write_text("LIMIT = 4\n")
    helper.write_text("LIMIT = 4\n")

    def said() -> set[str]:
        again = Run(tmp_path / "run").start()
        again.die()
        # files of other tests' modules, which are loaded in this process too, may have changed
        names = (str(later), str(helper))
        return {name for text in again.said for name in names if name in text}

    assert said() == {str(later)}
    monkeypatch.setattr(userfiles, "_read", {})
    assert said() == {str(later), str(helper)}


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "lock"])
def test_a_run_whose_folder_has_gone_writes_nothing_more(tmp_path: Path, how: str) -> None:
    """Not into the folder of a run that has begun under its name."""
    run = Run(tmp_path / "run").start().train(2).save()
    if how == "lock":
        (tmp_path / "run" / ".lock").unlink()
    else:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    if how in ("replaced", "lock"):
        Run(tmp_path / "run").start().train(1).save()
    before = contents(tmp_path)
    for write in (run.train, run.save, lambda: run.run_dir.write_summary({"step": 2})):
        with pytest.raises(RunFailed):
            write()
    with pytest.raises(RunFailed):
        run.save(required=False)
    assert contents(tmp_path) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_two_runs_in_one_folder_are_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """Whatever has become of a process that its rewards have forked."""
    begun, begins = os.pipe()
    ended, ends = os.pipe()
    first = os.fork()
    if not first:
        with suppress(Exception):
            run = Run(tmp_path / "run").start()
            run.train().save()
            if os.fork():
                os.write(begins, b"begun")
            os.close(ends)
            os.read(ended, 1)  # until the test closes its side
        os._exit(0)
    os.close(begins)
    assert os.read(begun, 9) == b"begun"
    refused(started, tmp_path / "run")
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert Run(tmp_path / "run").start().step == 1
    for end in (begun, ended, ends):
        os.close(end)


@pytest.mark.parametrize("resume", ["nowhere", "run/checkpoints/step_000009"])
def test_a_checkpoint_that_is_not_there_is_an_error(
    tmp_path: Path, resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    refused(started, tmp_path / "new", resume)


def test_users_code_may_change_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(Path("run"), "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.start().train().save().die()
    assert whole(tmp_path / "run") == [0, 1]
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_ends_the_run_only_at_its_last_save(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", keep_last=1).start().train().save().train()
    with full_disk(tmp_path / "run" / "checkpoints", after=1):
        run.save(required=False)
        with pytest.raises(RunFailed):
            run.save()
        run.save(required=False)
        run.run_dir.write_summary({"step": 2})
    assert whole(tmp_path / "run") == [1]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert len(run.said) == 3
    run.save(required=False)
    assert whole(tmp_path / "run") == [2]


def test_runs_of_a_second_have_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [Run(Path(), resume="", out_dir="").start() for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    assert all((run.folder / "config.toml").exists() for run in runs)

"""--track: a tracker gets what the JSONL files get, and cannot end a run."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minigrpo import Config
from minigrpo.runtime import trackers
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.run_log import RunLog
from minigrpo.runtime.trackers import check_tracker, start_trackers

from .test_reliability import make

METRICS = {"reward": 0.5, "rewards/exact/mean": 0.25, "step_time": 1.0}
SAMPLE = {
    "prompt": "2+2=",
    "completion": "5",
    "truth": "4",
    "parts": {"exact": 0.0, "format": 1.0},
    "reward": 0.5,
    "token_ids": [1, 2, 3],
}


class Recorder(ModuleType):
    """Stands for wandb and trackio, which have the same interface."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.began: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.ended = 0
        self.trouble: Exception | None = None
        self.refused, self.asked = "", 0

    def init(self, **options: Any) -> "Recorder":
        self.began = options
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.asked += 1
        if self.trouble:
            raise self.trouble
        if self.refused in values:
            raise TypeError("no such data type")
        self.logged.append((step, values))

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(request.param)
    monkeypatch.setitem(sys.modules, request.param, found)
    monkeypatch.delenv(f"{request.param.upper()}_PROJECT", raising=False)
    return found


def log_of(folder: Path, config: Config, step: int = 0, said: list[str] | None = None) -> RunLog:
    warn = pytest.fail if said is None else said.append
    listeners = start_trackers(config, folder, step, warn)
    return RunLog(folder, warn, start_step=step, listeners=listeners)


def test_names_are_those_of_the_jsonl_and_the_samples_of_a_step_are_a_table(
    tmp_path: Path, tracker: Recorder
) -> None:
    config = Config.of(track=tracker.__name__, group_size=8)
    check_tracker(config)
    log = log_of(tmp_path, config)
    log.evaluation(0, {"n": 8.0, "reward": 0.1})
    log.step(1, METRICS)
    log.sample(1, SAMPLE)
    log.sample(1, {**SAMPLE, "messages": [{"role": "user", "content": "2+2="}], "advantage": 1.0})
    log.step(2, METRICS)
    log.sample(2, SAMPLE)
    log.close()
    assert tracker.began["project"] == "minigrpo" and tracker.began["config"] == config.flat()
    assert [(step, list(values)) for step, values in tracker.logged] == [
        (0, ["eval/n", "eval/reward"]),
        (1, list(METRICS)),
        (1, ["samples"]),
        (2, list(METRICS)),
        (2, ["samples"]),
    ]
    first, second = tracker.logged[2][1]["samples"]
    assert first["prompt"] == "2+2=" and first["format"] == 1.0 and "token_ids" not in first
    assert '"role": "user"' in second["prompt"] and second["advantage"] == 1.0
    assert tracker.ended == 1


def test_a_resumed_run_continues_its_tracker_and_a_new_one_has_its_own(
    tmp_path: Path, tracker: Recorder
) -> None:
    config = Config.of(track=tracker.__name__)
    names = []
    for step in (0, 5, 0):
        log_of(tmp_path, config, step, []).close()
        names.append(tracker.began["name"])
    assert names[0] == names[1] != names[2]
    assert names[0].startswith(f"{tmp_path.name}-") and tracker.began["resume"] == "allow"


@pytest.mark.parametrize(("resume", "same"), [("2", False), ("auto", True)])
def test_a_run_that_abandons_steps_begins_a_new_one_in_the_tracker(
    tmp_path: Path, tracker: Recorder, resume: str, same: bool
) -> None:
    """Steps that a tracker has already are not taken again."""
    options: dict[str, Any] = {"track": tracker.__name__, "keep_last": 9, "eval_every": 0}
    names = []
    for more in ({"stop_after": 4}, {"resume": resume, "stop_after": 5}):
        tracker.logged.clear()
        make(tmp_path / "run", **options, **more).fit()
        names.append(tracker.began["name"])
    assert (names[0] == names[1]) == same
    steps = [step for step, values in tracker.logged if "reward" in values]
    assert steps == ([5] if same else [3, 4, 5])


def test_a_tracker_that_does_not_start_leaves_the_logs_as_they_are(
    tmp_path: Path, tracker: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "run", keep_last=9).fit()
    before = [path.read_bytes() for path in sorted((tmp_path / "run").glob("*.jsonl"))]
    monkeypatch.delattr(Recorder, "init")
    trainer = make(tmp_path / "run", keep_last=9, resume="2", track=tracker.__name__)
    with pytest.raises(ConfigError, match="does not start"):
        trainer.fit()
    assert [path.read_bytes() for path in sorted((tmp_path / "run").glob("*.jsonl"))] == before
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000006"]


@pytest.mark.parametrize("damage", ["", "../../x", "\xff"])
def test_a_damaged_name_is_made_anew(tmp_path: Path, tracker: Recorder, damage: str) -> None:
    config = Config.of(track=tracker.__name__)
    (tmp_path / "track_id").write_bytes(damage.encode("latin-1"))
    log_of(tmp_path, config, 5, []).close()
    name, _, digits = tracker.began["name"].rpartition("-")
    assert name == tmp_path.name and len(digits) == 8
    assert (tmp_path / "track_id").read_text() == f"{digits}\n{tmp_path}\n"


def test_a_copy_of_a_run_beside_it_is_another_one_in_the_tracker(
    tmp_path: Path, tracker: Recorder
) -> None:
    """Both wrote into one, because only the folder's own name told them apart."""
    config, said = Config.of(track=tracker.__name__), list[str]()

    def resumed(folder: Path, step: int = 5) -> str:
        start_trackers(config, folder, step, said.append)
        return str(tracker.began["name"])

    (tmp_path / "a" / "run").mkdir(parents=True)
    first = resumed(tmp_path / "a" / "run", 0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    second = resumed(tmp_path / "b" / "run")
    copied = f"b/run/{trackers.TRACK_ID}: is a copy of {tmp_path}/a/run/"
    assert [copied in x for x in said] == [True]
    assert second != first == resumed(tmp_path / "a" / "run")
    assert resumed(tmp_path / "b" / "run") == second and len(said) == 1
    # one that was moved, or that an older version wrote, goes on
    (tmp_path / "a").rename(tmp_path / "c")
    assert resumed(tmp_path / "c" / "run") == first
    (tmp_path / "c" / "run" / trackers.TRACK_ID).write_text(first[-8:])
    assert resumed(tmp_path / "c" / "run") == first and len(said) == 1


def test_parts_named_as_a_column_leave_the_column(tmp_path: Path, tracker: Recorder) -> None:
    log = log_of(tmp_path, Config.of(track=tracker.__name__))
    log.sample(1, {**SAMPLE, "parts": {"completion": 0.25, "short": 1.0}})
    log.close()
    (row,) = tracker.logged[-1][1]["samples"]
    assert (row["completion"], row["rewards/completion"], row["short"]) == ("5", 0.25, 1.0)


def test_a_folder_may_have_any_name(tmp_path: Path, tracker: Recorder) -> None:
    run = tmp_path / "a#b: ü?"
    run.mkdir()
    log_of(run, Config.of(track=tracker.__name__)).close()
    assert tracker.began["name"].startswith("a-b-----")


def test_trouble_while_the_run_goes_is_said_once_and_does_not_end_it(
    tmp_path: Path, tracker: Recorder
) -> None:
    said: list[str] = []
    log = log_of(tmp_path, Config.of(track=tracker.__name__), said=said)
    tracker.trouble = ConnectionError("no route to host")
    for step in (1, 2, 3):
        log.step(step, METRICS)
    log.close()
    assert said == [
        f"--track {tracker.__name__}: metrics of step {step} not logged (no route to host); {end}"
        for step, end in (
            (1, "the rest is tracked, and this is not said twice"),
            (3, "training continues untracked"),
        )
    ]
    assert tracker.asked == 3  # each failure may take long
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("kind", ["samples", "rewards/exact/mean", "eval/reward"])
def test_what_a_tracker_refuses_is_lost_alone_and_said_once(
    tmp_path: Path, tracker: Recorder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table ended all tracking. One that cannot be made is as bad as one that is refused."""
    said: list[str] = []
    log = log_of(tmp_path, Config.of(track=tracker.__name__), said=said)
    tracker.refused = kind
    if kind == "samples":
        monkeypatch.delattr(Recorder, "Table")
    for step in range(1, 6):
        log.evaluation(step, {"reward": 0.1})
        log.step(step, METRICS)
        log.sample(step, SAMPLE)
    log.close()
    assert len(said) == 1 and "of step 1 not logged" in said[0] and "the rest is tracked" in said[0]
    assert tracker.ended == 1 and len(tracker.logged) == 10
    assert not any(kind in values for _, values in tracker.logged)


def test_what_cannot_start_is_one_line(
    tmp_path: Path, tracker: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.of(track=tracker.__name__)

    def refuse(**options: Any) -> None:
        raise RuntimeError("not logged in\nsecond line")

    monkeypatch.setattr(tracker, "init", refuse)
    with pytest.raises(ConfigError, match="does not start \\(not logged in second line\\)"):
        start_trackers(config, tmp_path, 0, pytest.fail)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"pip install 'minigrpo\\[{tracker.__name__}\\]'"):
        check_tracker(config)
    with pytest.raises(ConfigError, match="--track must be none or wandb or trackio"):
        Config.of(track="mlflow")
    assert start_trackers(Config(), tmp_path, 0, pytest.fail) == []


OFFLINE = """
import sys
from pathlib import Path
from minigrpo import Config
from tests.test_trackers import METRICS, SAMPLE, log_of
name, folder = sys.argv[1:]
log = log_of(Path(folder), Config.of(track=name))
log.evaluation(0, {"reward": 0.1})
log.step(1, METRICS)
log.sample(1, SAMPLE)
log.close()
"""


@pytest.mark.tracker
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_packages_write_all_of_it_without_a_network(tmp_path: Path, name: str) -> None:
    """They are read when they are imported, so their settings need a process of its own."""
    run, kept = tmp_path / "run", tmp_path / "trackio"
    run.mkdir()
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(kept),
        "http_proxy": "http://127.0.0.1:9",  # nobody answers there
        "https_proxy": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-c", OFFLINE, name, run]
    subprocess.run(command, env=environment, check=True, timeout=120)
    folder = {"wandb": run / "wandb", "trackio": kept}[name]
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for word in (*METRICS, "eval/reward", "samples", "2+2="):
        assert word.encode() in written, word

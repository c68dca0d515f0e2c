import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import IO

import pytest
import torch

from minigrpo.runtime import checkpoint
from minigrpo.runtime.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    path_of,
    save_checkpoint,
)


def state(step: int) -> checkpoint.State:
    return {
        "model": {"w": torch.full((50,), float(step))},
        "optimizer": {},
        "step": step,
        "config": {"seed": 0},
    }


def save(folder: Path, *steps: int, keep_last: int = 9) -> None:
    for step in steps:
        save_checkpoint(folder, step, state(step), keep_last=keep_last)


@pytest.mark.parametrize("step", ["1", 1.0, True, -1, [1]])
def test_a_step_that_is_no_number_is_damage_although_the_hash_is_right(
    step: object, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path, 1, {**state(1), "step": step}, keep_last=9)
    with pytest.raises(CheckpointError, match="state.pt: its step is"):
        load_checkpoint(path)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 3)
    loaded = load_checkpoint(path_of(tmp_path, 3))
    assert torch.equal(loaded["model"]["w"], state(3)["model"]["w"])
    assert sorted(loaded) == ["config", "model", "optimizer", "step"]
    assert sorted(p.name for p in path_of(tmp_path, 3).iterdir()) == ["manifest.json", "state.pt"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step_000003", "step_000004"]


def test_a_newer_damaged_checkpoint_does_not_push_out_the_one_that_was_just_written(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 3)
    damage(path_of(tmp_path, 3) / "state.pt")
    save(tmp_path, 2, keep_last=1)
    found = find_checkpoint(tmp_path, "auto", lambda text: None)
    assert found is not None and found["step"] == 2


@pytest.mark.parametrize("kind", ["bit", "truncated", "no manifest", "no state", "empty manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, kind: str
) -> None:
    save(tmp_path, 1, 2)
    newest = path_of(tmp_path, 2)
    if kind == "bit":
        damage(newest / "state.pt")
    elif kind == "truncated":
        os.truncate(newest / "state.pt", 100)
    elif kind == "empty manifest":
        (newest / "manifest.json").write_text("")
    else:
        (newest / ("manifest.json" if kind == "no manifest" else "state.pt")).unlink()
    warnings: list[str] = []
    found = find_checkpoint(tmp_path, "auto", warnings.append)
    assert found is not None and found["step"] == 1
    assert len(warnings) == 1 and "step_000002" in warnings[0]


def test_with_only_damaged_checkpoints_auto_is_an_error_and_with_none_a_fresh_start(
    tmp_path: Path,
) -> None:
    assert find_checkpoint(tmp_path, "auto", pytest.fail) is None
    save(tmp_path, 1)
    damage(path_of(tmp_path, 1) / "state.pt")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        find_checkpoint(tmp_path, "auto", lambda text: None)


def test_a_run_that_was_killed_in_its_very_first_save_starts_afresh(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = path_of(tmp_path, 1) / "manifest.json"
    manifest.rename(manifest.with_name("manifest.json.tmp"))  # its new name comes last
    warnings: list[str] = []
    assert find_checkpoint(tmp_path, "auto", warnings.append) is None
    assert len(warnings) == 1 and "step_000001" in warnings[0]


def test_what_is_left_of_a_save_that_was_killed_is_removed_and_a_damaged_checkpoint_is_kept(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step_000002" / "state.pt").unlink()
    for path in (tmp_path / "step_000003").iterdir():
        path.rename(path.with_name(path.name + ".tmp"))
    checkpoint.set_aside(checkpoint.checkpoints(tmp_path)[1:], ".unreadable")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_000001", "step_000002.unreadable"]


def test_checkpoints_are_set_aside_from_the_last_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in between, the newest one left followed steps that had been abandoned."""
    save(tmp_path, 1, 2, 3)
    rename, left = Path.rename, [1]

    def killed(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.set_aside(checkpoint.checkpoints(tmp_path)[1:], ".abandoned")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step_000001",
        "step_000002",
    ]


def test_a_step_that_is_not_there_is_an_error_that_lists_what_is(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    with pytest.raises(CheckpointError, match=r"--resume 15: no such checkpoint .* there: 10, 20"):
        find_checkpoint(tmp_path, "15", pytest.fail)
    found = find_checkpoint(tmp_path, "10", pytest.fail)
    assert found is not None and found["step"] == 10


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    with open(tmp_path / "evil", "wb") as file:
        pickle.dump({"model": Evil()}, file)
    save_checkpoint(tmp_path, 1, {"step": 1}, keep_last=1)
    target = path_of(tmp_path, 1)
    (target / "state.pt").write_bytes((tmp_path / "evil").read_bytes())
    digest = hashlib.sha256((tmp_path / "evil").read_bytes()).hexdigest()
    (target / "manifest.json").write_text(json.dumps({"files": {"state.pt": digest}}))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(target)
    assert not (tmp_path / "owned").exists()


def test_a_save_that_fails_leaves_the_older_checkpoints_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def disk_full(state: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(RuntimeError, match="no space left"):
        save(tmp_path, 2, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    found = find_checkpoint(tmp_path, "auto", lambda text: None)
    assert found is not None and found["step"] == 1

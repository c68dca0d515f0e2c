"""Atomic checkpoints: each is either complete or ignored. run_dir.py decides when to save and load.

A file is written under another name, flushed to disk and renamed; then its manifest, with a sha256,
is written the same way. The hash is needed because torch loads a file with a flipped bit without
complaint. A checkpoint without a matching manifest does not count. `state.pt` is a dict of plain
types and tensors, so it loads with `weights_only=True` and cannot run code.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def save_checkpoint(folder: Path, step: int, state: State, *, keep_last: int) -> Path:
    """Write `step_NNNNNN/{state.pt, manifest.json}`, then keep only the newest `keep_last`.

    Raises OSError, or RuntimeError, which torch raises for a full disk. Then older checkpoints are
    untouched, and the partial file is removed.
    """
    target = path_of(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    # an old manifest must not be found next to the new file
    (target / "manifest.json").unlink(missing_ok=True)
    digest = _write(target / "state.pt", lambda path: torch.save(state, path))
    manifest = json.dumps({"step": step, "files": {"state.pt": digest}}, indent=1)
    _write(target / "manifest.json", lambda path: path.write_text(manifest + "\n"))
    for old in [path for path in checkpoints(folder) if path != target][: -keep_last + 1 or None]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, complete or not, by step."""
    return sorted(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def discard_after(folder: Path, step: int) -> None:
    """Remove checkpoints of later steps: damaged ones, or those of a run that started over."""
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def _write(path: Path, write: Callable[[Path], object]) -> str:
    """Write a file atomically, even if the machine stops; return its sha256."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
        _flush_folder(path.parent.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged; the message names the file."""


def load_checkpoint(path: Path) -> State:
    """The state in a checkpoint's folder. Raises CheckpointError if it is missing or damaged."""
    file, manifest = path / "state.pt", path / "manifest.json"
    try:
        promised = json.loads(manifest.read_text())["files"]["state.pt"]
        with open(file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{manifest.parent}: not a whole checkpoint ({type(error).__name__}: {error})"
        ) from None
    if found != promised:
        raise CheckpointError(f"{file}: damaged, its sha256 is not the one in its manifest")
    try:
        state: State = torch.load(file, map_location="cpu", weights_only=True)
    # EOFError, UnpicklingError or RuntimeError, depending on where the file is damaged
    except Exception as error:
        raise CheckpointError(
            f"{file}: cannot be loaded ({str(error).splitlines()[0][:200]})"
        ) from None
    return state


def find_checkpoint(folder: Path, resume: str, warn: Callable[[str], object]) -> State | None:
    """The state to resume from, or None to start afresh.

    `resume` is "" (start afresh), "auto" (the newest intact checkpoint; `warn` names damaged ones)
    or a step. Raises CheckpointError if that step is missing or damaged, or if all are damaged.
    """
    if not resume:
        return None
    if resume != "auto":
        path = path_of(folder, int(resume))
        if not path.exists():
            there = (
                ", ".join(str(int(path.name.removeprefix("step_"))) for path in checkpoints(folder))
                or "none"
            )
            raise CheckpointError(
                f"--resume {resume}: no such checkpoint in {folder}; there: {there}"
            )
        return load_checkpoint(path)
    paths = checkpoints(folder)[::-1]
    for path in paths:
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            warn(f"{error}; trying the one before it")
    if any((path / "manifest.json").exists() for path in paths):
        raise CheckpointError(
            f"--resume auto: no checkpoint in {folder} is whole; remove the folder to start afresh"
        )
    # no checkpoint, or only a first save that never finished: nothing is lost
    return None

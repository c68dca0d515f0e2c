"""Atomic checkpoints: each is either whole or ignored. run_dir.py decides when to save and load.

    checkpoints/step_000100/state.pt        plain types and tensors, loaded with weights_only=True
    checkpoints/step_000100/manifest.json   the sha256 of state.pt, written last

Every file is written aside, flushed to disk and renamed, so that a kill or a full disk leaves the
old contents, never a part of the new ones. The hash is needed because torch loads a file with a
flipped bit without complaint.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..types import ConfigError
from .guard import RunFailed

State = dict[str, Any]
STATE, MANIFEST = "state.pt", "manifest.json"
PARTIAL = ".tmp"  # what the name of an unfinished file ends with
OWN_FILES = (MANIFEST, STATE, MANIFEST + PARTIAL, STATE + PARTIAL)


class CheckpointError(ConfigError):
    """A checkpoint is missing or damaged; the message names the file."""


# --- files that are written whole or not at all ---------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` puts into the path that it is given. Raises what it raises."""
    write_aside(path, write)
    put_in_place(path)


def write_aside(path: Path, write: Callable[[Path], object]) -> str:
    """Let `write` fill a temporary file, flush it to disk, and return its sha256."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return digest


def put_in_place(path: Path) -> None:
    """Rename what `write_aside` wrote, and flush the folder, so that a power cut cannot undo it."""
    os.replace(path.with_name(path.name + PARTIAL), path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- names ----------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 for any other name."""
    found = re.fullmatch(r"step_([0-9]{6}|[1-9][0-9]{6,})", path.name)
    return int(found[1]) if found else -1


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder by step: those that were whole once. Other files do not count."""
    return [path for path in _folders(folder) if not _was_interrupted(path)]


def _folders(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, by step."""
    found = [path for path in folder.glob("step_*") if step_of(path) >= 0]
    for path in found:
        if not path.is_dir():
            raise ConfigError(f"{path}: is in the way of a checkpoint")
    return sorted(found, key=step_of)


def _was_interrupted(path: Path) -> bool:
    """Whether a process died during the first save here: nothing that was whole is lost."""
    names = {file.name for file in path.iterdir()}
    return names <= {*OWN_FILES} and MANIFEST not in names and names != {STATE}


# --- writing --------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, step: int, state: State, *, keep_last: int = 1) -> Path:
    """Write a checkpoint, then keep the newest `keep_last` up to this step.

    With no room on the disk, but two older whole ones, the oldest of them is given up for it.
    Raises OSError for a full disk, and RunFailed if a value is not finite; then nothing partial is
    left.
    """
    if name := first_not_finite(state):
        raise RunFailed(f"step {step}: not saved, because {name} has values that are not finite")
    target = path_of(folder, step)
    older = [path for path in _folders(folder) if step_of(path) < step]
    try:
        _write(target, step, state)
    except OSError as error:
        no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        whole = [path for path in older if no_room and not _problem(path)]
        if len(whole) < 2 or not _remove(whole[0]):
            raise
        return save_checkpoint(folder, step, state, keep_last=keep_last)
    finished = [path for path in older if (path / MANIFEST).exists()]
    kept = finished[max(0, len(finished) - keep_last + 1) :]
    for path in older:
        if path not in kept:
            _remove(path)
    return target


def _write(target: Path, step: int, state: State) -> None:
    target.mkdir(parents=True, exist_ok=True)
    file, manifest = target / STATE, target / MANIFEST
    try:
        digest = write_aside(file, lambda path: _write_state(path, state))
        text = json.dumps({"step": step, "files": {STATE: digest}}, indent=1) + "\n"
        write_aside(manifest, lambda path: path.write_text(text))
        put_in_place(file)
        put_in_place(manifest)
        flush_folder(target.parent)
    except BaseException:
        _remove(target)  # what was there of this step before, if anything, was damaged
        raise


def _write_state(path: Path, state: State) -> None:
    """torch.save, which hides the system's error, such as a full disk, behind one of its own."""
    with open(path, "wb") as opened:
        try:
            torch.save(state, opened)
        except RuntimeError as error:
            hidden = error.__context__
            raise hidden if isinstance(hidden, OSError) else error from None


def _remove(path: Path) -> bool:
    """Remove a checkpoint, but nothing that is not part of it; whether that was possible."""
    try:
        for name in OWN_FILES:
            (path / name).unlink(missing_ok=True)
        path.rmdir()
    except OSError:
        return False
    return True


def first_not_finite(state: Mapping[str, Any]) -> str:
    """The name of a tensor or number in a state that is NaN or infinite, or "" if all are finite.

    One fused pass over the tensors; only if that finds something, a search.
    """
    leaves = list(_leaves(state))
    bad = [name for name, x in leaves if isinstance(x, float) and not math.isfinite(x)]
    tensors = [(name, x) for name, x in leaves if isinstance(x, Tensor) and x.numel()]
    tensors = [(name, x) for name, x in tensors if x.is_floating_point()]
    if not torch.nn.utils.get_total_norm([x for _, x in tensors]).isfinite():
        bad += [name for name, x in tensors if not x.isfinite().all()]
    return bad[0] if bad else ""


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dicts and lists, with names such as `optimizer.state.0.exp_avg`."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


# --- reading --------------------------------------------------------------------------------------


def load_checkpoint(path: Path) -> State:
    """The state in a checkpoint's folder. Raises CheckpointError if it is missing or damaged."""
    if problem := _problem(path):
        raise CheckpointError(f"{path}: not a whole checkpoint ({problem})")
    try:
        state: State = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that would run code; torch raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path / STATE}: cannot be loaded ({reason})") from None
    return state


def newest(folder: Path, warn: Callable[[str], object]) -> Path:
    """The newest whole checkpoint; `warn` names those that are damaged.

    Raises CheckpointError if there is none.
    """
    for path in checkpoints(folder)[::-1]:
        if not (problem := _problem(path)):
            return path
        warn(f"{path}: not a whole checkpoint ({problem}); trying the one before it")
    raise CheckpointError(f"{folder}: has no whole checkpoint")


def _problem(path: Path) -> str:
    """Why a checkpoint is not whole, or "" if its manifest has the sha256 of its state."""
    try:
        promised = json.loads((path / MANIFEST).read_bytes())["files"][STATE]
        with open(path / STATE, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == promised else f"the sha256 of {STATE} is not the one in its manifest"

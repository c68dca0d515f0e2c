"""Atomic checkpoints: each is either whole or ignored. run_dir.py decides when to save and load.

    checkpoints/step_000100/state.pt        plain types and tensors, loaded with weights_only=True
    checkpoints/step_000100/manifest.json   the sha256 of state.pt

Files and folders are written aside, flushed to disk and renamed, so that a kill or a full disk
leaves the old contents. Torch loads a file with a flipped bit without complaint, hence the hash.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .types import ConfigError, Warn
from .userfiles import sha256_of

State = dict[str, Any]
STATE = "state.pt"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file, or make a folder, with what `write` writes to the path that it gets."""
    aside = path.with_name(f".partial_{path.name}")
    try:
        write(aside)
        if aside.is_file():  # a folder's files are flushed by `write`
            flush(aside)
        os.replace(aside, path)
    except BaseException:
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda aside: aside.write_text(text, "utf-8"))


def flush(path: Path) -> None:
    """Have the system write a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder, or -1 for any other name."""
    match = re.fullmatch(r"step_([0-9]{6,})", path.name)
    return int(match[1]) if match else -1


def checkpoints(folder: Path) -> list[Path]:
    """The folders of checkpoints by step, also damaged ones."""
    return sorted((path for path in folder.glob("step_*") if step_of(path) >= 0), key=step_of)


def save_checkpoint(folder: Path, state: State, *, keep_last: int = 1) -> None:
    """Write the checkpoint of state["step"], then delete older ones but the newest `keep_last`.

    If the disk is full, the oldest of two or more undamaged older ones makes room. Otherwise a full
    disk raises OSError. A value that is not finite raises ValueError.
    """
    if not is_finite(state):
        raise ValueError("some values are not finite")
    target = folder / f"step_{state['step']:06d}"
    older = [path for path in checkpoints(folder) if step_of(path) < state["step"]]
    shutil.rmtree(target, ignore_errors=True)  # a damaged checkpoint
    try:
        write_atomically(target, lambda aside: write_state(aside, state))
    except OSError as error:
        whole = [path for path in older if is_whole(path)]
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(whole) < 2:
            raise
        shutil.rmtree(whole[0])
        save_checkpoint(folder, state, keep_last=keep_last)
    for path in older[::-1][keep_last - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def write_state(folder: Path, state: State) -> None:
    folder.mkdir(parents=True, exist_ok=True)  # a process may have been killed at this step
    with open(folder / STATE, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own error, which hides the system's
            raise error.__context__ or error from None
    flush(folder / STATE)
    manifest = {"step": state["step"], "files": {STATE: sha256_of(folder / STATE)}}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def is_finite(state: State) -> bool:
    """Whether no tensor or number in a state is NaN or infinite."""
    numbers = (x for x in tree_leaves(state) if isinstance(x, float | Tensor))
    return all(torch.as_tensor(x).isfinite().all() for x in numbers)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint's manifest can be read and has the sha256 of its state."""
    try:
        return json.loads((path / MANIFEST).read_bytes())["files"][STATE] == sha256_of(path / STATE)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest(path: Path, warn: Warn) -> Path:
    """The newest whole checkpoint of a run, or `path` itself if it is one."""
    is_checkpoint = step_of(path) >= 0
    for checkpoint in [path] if is_checkpoint else reversed(checkpoints(path / CHECKPOINTS)):
        if is_whole(checkpoint):
            return checkpoint
        warn(f"{checkpoint}: is missing or damaged, and is not used")
    raise ConfigError(f"{path}: has no checkpoint that is whole")


def load_checkpoint(path: Path) -> State:
    return torch.load(path / STATE, map_location="cpu", weights_only=True)

"""Atomic checkpoints: each is either complete or ignored. run_dir.py decides when to save and load.

Both files of a checkpoint are written under temporary names and flushed to disk; then `state.pt` is
renamed, and its manifest, with a sha256, last. The hash is needed because torch loads a file with a
flipped bit without complaint. A checkpoint without a matching manifest does not count. `state.pt`
is a dict of plain types and tensors, so it loads with `weights_only=True` and cannot run code.
"""

import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .failures import NotFinite, reason_of
from .files import PARTIAL, flush_folder, put_in_place, write_aside
from .text import parse_json, quoted

State = dict[str, Any]
STATE, MANIFEST = "state.pt", "manifest.json"
PARTIALS = {STATE + PARTIAL, MANIFEST + PARTIAL}
# what the names of checkpoints end with that --resume N abandons until the next save, and of those
# that --resume auto cannot read
ABANDONED, UNREADABLE = ".abandoned", ".unreadable"
# what a state holds, each a dict by text
PLAIN = ("config", "guard", "shape", "made_by", "files", "tokenizer")
WITH_TENSORS = ("model", "optimizer", "scaler")
FORMAT = 1  # raised when an older version of the library could misread a checkpoint


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged; the message names the file."""


class NewerCheckpoint(ValueError):
    """A newer version of the library wrote the checkpoint. Using an older one would lose work."""


# --- names ----------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder, or None for any other name."""
    found = re.fullmatch(r"step_([0-9]+)", path.name)
    step = int(found[1]) if found else None
    return step if step is not None and path_of(path.parent, step) == path else None


def checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, complete or not, by step. Whatever else is there does not count."""
    steps = {path: step_of(path) for path in folder.iterdir()} if folder.is_dir() else {}
    found = [(step, path) for path, step in steps.items() if step is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def in_the_way(folder: Path) -> list[Path]:
    """What has the name of a checkpoint, or of a file in one, but is of another kind."""
    there = folder.iterdir() if folder.is_dir() else ()
    named = sorted(path for path in there if step_of(path) is not None)
    names = [name + end for name in (STATE, MANIFEST) for end in ("", PARTIAL)]
    blocked = [path for path in named if not path.is_dir()]
    return blocked + [path / x for path in named for x in names if (path / x).is_dir()]


def was_interrupted(path: Path) -> bool:
    """Whether a process died while it saved here. Then nothing that was ever complete is lost.

    A folder with other files belongs to another program, such as one that also writes step_000100.
    """
    names = {file.name for file in path.iterdir()}
    return names <= {STATE, *PARTIALS} and (STATE not in names or bool(names & PARTIALS))


def set_aside(paths: Sequence[Path], suffix: str) -> None:
    """Rename checkpoints, which are in order of their steps, so that they no longer count as such.

    The last one first: after a kill in between, --resume auto goes on from a step before them. What
    a process left that died while it wrote its first file is removed.
    """
    for path in reversed(paths):
        if {file.name for file in path.iterdir()} <= PARTIALS:
            remove(path)
            continue
        target = path.with_name(path.name + suffix)
        if target.exists():
            remove(target)
        path.rename(target)


def remove_abandoned(folder: Path) -> None:
    """Remove the checkpoints that --resume N has set aside, as far as possible."""
    for path in folder.glob(f"*{ABANDONED}"):
        if step_of(path.with_suffix("")) is not None:
            with suppress(OSError):
                remove(path)


def remove(path: Path) -> None:
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


# --- writing --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    step: int,
    state: State,
    *,
    keep_last: int,
    warn: Callable[[str], object] = lambda text: None,
) -> Path:
    """Write `step_NNNNNN/{state.pt, manifest.json}`, then keep only the newest `keep_last`.

    An old one that cannot be removed is warned of. Raises NotFinite if a value in the state is not
    finite, and OSError for a full disk. Then older checkpoints are untouched, and nothing partial
    is left.
    """
    if name := first_not_finite(state):
        raise NotFinite(f"step {step}: not saved, because {name} has values that are not finite")
    target = path_of(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    file, manifest = target / STATE, target / MANIFEST
    try:
        digest = write_aside(file, lambda path: _write_state(path, state))
        contents = {"format": FORMAT, "step": step, "files": {STATE: digest}}
        text = json.dumps(contents, indent=1) + "\n"
        write_aside(manifest, lambda path: path.write_text(text))
    except BaseException:
        file.with_name(STATE + PARTIAL).unlink(missing_ok=True)
        if not any(target.iterdir()):
            target.rmdir()
        raise
    manifest.unlink(missing_ok=True)  # an old manifest must not be found next to the new file
    put_in_place(file)
    put_in_place(manifest)
    flush_folder(folder)
    for old in [path for path in checkpoints(folder) if path != target][: -keep_last + 1 or None]:
        try:
            remove(old)
        except OSError as error:
            warn(f"{old}: an old checkpoint cannot be removed ({reason_of(error)})")
    return target


def _write_state(path: Path, state: State) -> None:
    """torch.save, which hides the system's error, such as a full disk, behind one of its own."""
    with open(path, "wb") as opened:
        try:
            torch.save(state, opened)
        except RuntimeError as error:
            hidden = error.__context__
            raise hidden if isinstance(hidden, OSError) else error from None


def first_not_finite(state: Mapping[str, Any]) -> str:
    """The name of a tensor or number in a state that is NaN or infinite, or "" if all are finite.

    One fused pass over the tensors of each device; only if that finds something, a search.
    """
    tensors = {name: x for name, x in _leaves(state) if isinstance(x, Tensor)}
    tensors = {name: x for name, x in tensors.items() if x.is_floating_point() and x.numel()}
    bad = [name for name, x in _leaves(state) if isinstance(x, float) and not math.isfinite(x)]
    places = defaultdict[torch.device, list[Tensor]](list)
    for x in tensors.values():
        places[x.device].append(x)
    if not all(torch.nn.utils.get_total_norm(group).isfinite() for group in places.values()):
        bad += [name for name, x in tensors.items() if not x.isfinite().all()]
    return bad[0] if bad else ""


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dicts and lists, with names such as `optimizer.state.0.exp_avg`."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


# --- reading --------------------------------------------------------------------------------------


def load_checkpoint(path: Path) -> State:
    """The state in a checkpoint's folder.

    Raises CheckpointError if it is missing, damaged, or not finite; NewerCheckpoint if this version
    cannot read it.
    """
    file, manifest = path / STATE, path / MANIFEST
    try:
        contents = parse_json(manifest.read_bytes())
        written_as = contents.get("format", 0)  # 0: from before there were formats
        promised = contents["files"][STATE] if written_as <= FORMAT else ""
        with open(file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a whole checkpoint ({type(error).__name__}: {reason_of(error)})"
        ) from None
    if written_as > FORMAT:
        raise NewerCheckpoint(
            f"{path}: has format {written_as}, written by a newer version of minigrpo; "
            f"this one reads formats up to {FORMAT}"
        )
    if found != promised:
        raise CheckpointError(f"{file}: damaged, its sha256 is not the one in its manifest")
    try:
        state: State = torch.load(file, map_location="cpu", weights_only=True)
        problem = _misfit(state, step_of(path))
        name = "" if problem else first_not_finite(state)
    # EOFError, UnpicklingError or RuntimeError, depending on where the file is damaged
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be loaded ({reason_of(error)})") from None
    if problem or name:
        raise CheckpointError(f"{file}: {problem or f'{name} has values that are not finite'}")
    return state


def _misfit(state: Any, step: int | None) -> str:
    """What is wrong with a state whose folder is named for a step, or ""."""
    if not isinstance(state, dict):
        return "is not the state of a run"
    for name in (*PLAIN, *WITH_TENSORS):
        found = {} if state.get(name) is None else state[name]
        fits = isinstance(found, dict) and all(isinstance(key, str) for key in found)
        plain = name in WITH_TENSORS or not any(isinstance(x, Tensor) for _, x in _leaves(found))
        if not fits or not plain:
            return f"its {name} is {quoted(state[name])}"
    found = state.get("step", step)
    if found is not None and (type(found) is not int or found < 0):
        return f"its step is {quoted(found)}"
    if step is not None and found != step:
        return f"is the state of step {found}, in a folder that is named for step {step}"
    return ""


def existing_checkpoint(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint. Raises CheckpointError, with the steps that are there."""
    paths = checkpoints(folder)
    if path_of(folder, step) not in paths:
        there = ", ".join(str(step_of(path)) for path in paths) or "none"
        raise CheckpointError(f"--resume {step}: no such checkpoint in {folder}; there: {there}")
    return path_of(folder, step)


def find_checkpoint(folder: Path, resume: str, warn: Callable[[str], object]) -> State | None:
    """The state to resume from, or None to start afresh.

    `resume` is "" (start afresh), "auto" (the newest intact checkpoint; `warn` names damaged ones)
    or a step. Raises CheckpointError if that step is missing or damaged, or if all are damaged;
    NewerCheckpoint if this version cannot read the one to use.
    """
    if not resume:
        return None
    if resume != "auto":
        return load_checkpoint(existing_checkpoint(folder, int(resume)))
    paths = checkpoints(folder)[::-1]
    for path in paths:
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            warn(f"{error}; trying the one before it")
    if not all(map(was_interrupted, paths)):
        raise CheckpointError(
            f"--resume auto: no checkpoint in {folder} is whole; take another folder to start "
            "afresh"
        )
    # no checkpoint, or only a first save that never finished: nothing is lost
    return None

"""Files that are written whole or not at all, and JSON that is strict when written.

A file is written under another name, flushed to disk and renamed. A full disk or a kill then leaves
the previous contents, never a part of the new ones.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

PARTIAL = ".tmp"  # what the name of an unfinished file ends with
NUM_NOT_FINITE = "num_nonfinite"  # key in a record: how many of its values were not finite


def write_aside(path: Path, write: Callable[[Path], object]) -> str:
    """Let `write` fill a temporary file, flush it to disk, and return its sha256.

    `put_in_place` gives it its name. If writing fails, the temporary file is removed.
    """
    temporary = path.with_name(path.name + PARTIAL)
    try:
        # one that a kill has left may have another name in a copy made of hard links
        temporary.unlink(missing_ok=True)
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


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` puts into the path that it is given. Raises what it raises."""
    write_aside(path, write)
    put_in_place(path)


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[Any] | int) -> bool:
    """Lock a file for as long as it is open; False if another process has locked it.

    `file` may be the descriptor of a folder. On a file system without locks the answer is True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# --- JSON -----------------------------------------------------------------------------------------


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record that is valid JSON: null for NaN and infinities, with their number, if any."""
    count = 0

    def clean(value: Any) -> Any:
        nonlocal count
        if isinstance(value, float) and not math.isfinite(value):
            count += 1
            return None
        if isinstance(value, Mapping):
            return {name: clean(x) for name, x in value.items()}
        if isinstance(value, list | tuple):
            return [clean(x) for x in value]
        return value

    cleaned: dict[str, Any] = clean(record)
    return cleaned | ({NUM_NOT_FINITE: count} if count else {})


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as strict JSON, with a line break at the end."""
    return json.dumps(strict(record), indent=indent, allow_nan=False) + "\n"

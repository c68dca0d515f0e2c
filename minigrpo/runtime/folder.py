"""The folder that --out-dir names: create or reopen it, check what it holds, and lock it."""

import tempfile
import time
from pathlib import Path
from typing import IO

from ..config import Config
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS
from ..model.weight_files import WEIGHTS
from .checkpoint import checkpoints, existing_checkpoint, in_the_way
from .failures import reason_of
from .files import PARTIAL, lock_file
from .flags import ConfigError

# A folder with any of these holds a run, or a model, which a new run would overwrite.
OF_A_RUN = [
    "config.toml",
    "metrics.jsonl",
    "eval.jsonl",
    "samples.jsonl",
    "summary.json",
    WEIGHTS,
    PEFT_WEIGHTS,
]
FOLDERS = ["tensorboard", "bad_batches", "profile"]
OF_A_RUN += FOLDERS
# Written after the last step: what is in their way must be found before the first.
WRITTEN_LATE = ["summary.json", WEIGHTS, PEFT_WEIGHTS, PEFT_CONFIG]


def working_folder() -> Path:
    """The current folder as an absolute path, or an empty path if it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def make_folder(config: Config, start: Path = Path()) -> Path:
    """Create the folder of --out-dir, or reopen it to resume; return it as the flag names it.

    A relative one is in `start`: a user's code may have changed the current folder.

    Raises ConfigError if it is not writable, or holds a run and --resume is not given;
    CheckpointError if it lacks the step of --resume. Then nothing is created.
    """
    out_dir, resume = config.run.out_dir, config.run.resume
    folder = Path(out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.loss.name}")
    try:
        str(folder).encode()
        while not out_dir and (start / folder).exists():  # two runs were started in the same second
            folder = folder.with_name(folder.name + "+")
        _check_contents(start / folder, resume, folder)
        (start / folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for written in (start / folder, start / folder / "checkpoints"):
            tempfile.TemporaryFile(dir=written).close()
    except UnicodeEncodeError:
        raise ConfigError(f"--out-dir {str(folder)!a}: the name must be UTF-8") from None
    except OSError as error:
        shown = str(folder) if len(str(folder)) < 100 else f"{str(folder)[:100]}..."
        raise ConfigError(f"--out-dir {shown}: cannot be written ({reason_of(error)})") from None
    return folder


def _check_contents(folder: Path, resume: str, shown: Path) -> None:
    """Raise ConfigError or CheckpointError if a folder is not as --resume says; name it `shown`."""
    there = [name for name in OF_A_RUN if (folder / name).exists()]
    there += [str(path.relative_to(folder)) for path in checkpoints(folder / "checkpoints")]
    if there and not resume:
        raise ConfigError(
            f"--out-dir {shown}: holds a run; --resume auto continues it, "
            f"another folder starts afresh (found: {there[0]})"
        )
    if blocked := in_the_way(folder / "checkpoints"):
        raise ConfigError(f"--out-dir: {blocked[0]} is in the way of a checkpoint")
    for name in WRITTEN_LATE:
        for file in (folder / name, folder / f"{name}{PARTIAL}"):
            if file.is_dir():
                raise ConfigError(f"--out-dir {shown}: {file.name} in it is a folder, not a file")
    for name in FOLDERS:
        if (folder / name).is_file():
            raise ConfigError(f"--out-dir {shown}: {name} in it is a file, not a folder")
    if resume not in ("", "auto"):
        existing_checkpoint(folder / "checkpoints", int(resume))


def lock(folder: Path) -> IO[str]:
    """Keep other processes out of a folder for as long as the returned file is open.

    Raises ConfigError if another run holds the lock. The lock ends with the process in any case.
    """
    try:
        file = open(folder / ".lock", "a")
    except OSError as error:
        raise ConfigError(f"{folder / '.lock'}: cannot be written ({reason_of(error)})") from None
    if not lock_file(file):
        file.close()
        raise ConfigError(
            f"--out-dir {folder}: another run is writing to it; "
            "wait until it ends, or choose another folder"
        )
    return file

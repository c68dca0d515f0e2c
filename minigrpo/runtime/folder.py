"""The folder that --out-dir names: create or reopen it, check what it holds, and lock it."""

import os
import tempfile
import time
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from ..config import Config
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS
from ..model.weight_files import INDEX, WEIGHTS
from .answers import ANSWERS
from .checkpoint import checkpoints, existing_checkpoint, in_the_way
from .failures import reason_of
from .files import PARTIAL, lock_file
from .flags import ConfigError
from .job_summary import JOB_SUMMARY
from .settings import RECORD, is_run
from .trackers import TRACK_ID

LOGS = ["metrics.jsonl", "eval.jsonl", ANSWERS, "samples.jsonl"]
# A folder with any of these holds a run, or a model, which a new run would overwrite or hide.
OF_A_RUN = [RECORD, *LOGS, "summary.json", WEIGHTS, PEFT_WEIGHTS]
OF_A_MODEL = [INDEX, PEFT_CONFIG]  # beside a run's weights, they would be those of another model
CHECKPOINTS, LOCK = "checkpoints", ".lock"
FOLDERS = ["tensorboard", "bad_batches", "profile"]
OF_A_RUN += [*FOLDERS, JOB_SUMMARY, TRACK_ID]
# Written after the last step: what is in their way must be found before the first.
WRITTEN_LATE = ["summary.json", ANSWERS, WEIGHTS, PEFT_WEIGHTS, PEFT_CONFIG]


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
    check_home("--out-dir", shown)
    there = [name for name in (*OF_A_RUN, *OF_A_MODEL) if (folder / name).exists()]
    there += [str(path.relative_to(folder)) for path in checkpoints(folder / "checkpoints")]
    if there and not resume:
        what = "a model" if there[0] in OF_A_MODEL else "a run"
        raise ConfigError(
            f"--out-dir {shown}: holds {what}; --resume auto continues a run, "
            f"another folder starts afresh (found: {there[0]})"
        )
    check_not_among_checkpoints("--out-dir", folder)
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


def check_home(flag: str, path: Path) -> None:
    """Raise ConfigError for ~, which a shell leaves as it is in --out-dir=~/runs, as TOML does."""
    if path.parts[:1] == ("~",):
        raise ConfigError(
            f"{flag} {path}: would be a folder named ~, because the shell has not replaced it; "
            "write the path in full"
        )


def check_not_among_checkpoints(flag: str, path: Path) -> None:
    """Raise ConfigError for a path in the folder of a run's checkpoints, which removes old ones."""
    for folder in map(Path, accumulate(Path(os.path.realpath(path)).parts, os.path.join)):
        if folder.name == CHECKPOINTS and is_run(folder.parent):
            raise ConfigError(
                f"{flag} {path}: is among the checkpoints of a run, which removes old ones with "
                "all that is in them; take another folder"
            )


def said_gone(folder: Path) -> str:
    """What to say if a run's folder was removed or renamed; "" if it was not.

    Then what it has from the start is not there. A user may delete one of these files alone, and
    the logs are made anew.
    """
    if any((folder / name).exists() for name in (RECORD, LOCK)):
        return ""
    return (
        f"{folder}: was removed or renamed while the run wrote to it; the logs and the checkpoints "
        "of before are not there any more"
    )


def lock(folder: Path) -> ExitStack:
    """Keep other processes out of a folder until the returned stack is closed.

    Raises ConfigError if another run holds the lock. The lock ends with the process in any case.
    """
    held = ExitStack()
    try:
        file = held.enter_context(open(folder / LOCK, "a"))
        place = os.open(folder, os.O_RDONLY)
    except OSError as error:
        held.close()
        raise ConfigError(f"{folder / LOCK}: cannot be written ({reason_of(error)})") from None
    held.callback(os.close, place)
    # both: who deletes the file does not unlock the folder, and some file systems lock files alone
    if not (lock_file(file) and lock_file(place)):
        held.close()
        raise ConfigError(
            f"--out-dir {folder}: another run is writing to it; "
            "wait until it ends, or choose another folder"
        )
    return held

"""Check where a command will write before it starts to work, and write without losing a file.

`check_output_file` and `check_output_folder` change nothing on the disk, so that a command which
stops for another reason leaves nothing behind. A disk can still fill up afterwards: `write_output`
turns that into the same one line, and keeps the file that was there before.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..model.tokenizer_files import FILES
from ..model.weight_files import CONFIG
from .checkpoint import MANIFEST
from .flags import ConfigError
from .folder import FOLDERS, LOCK, OF_A_MODEL, OF_A_RUN, check_home, check_not_among_checkpoints
from .settings import is_run

# A figure or table written onto one of them would lose what training has made.
OF_A_RUN_OR_MODEL = {*OF_A_RUN, *OF_A_MODEL, MANIFEST, CONFIG, LOCK, *FILES}

STREAMS = {f"/dev/{name}": number for number, name in ((1, "stdout"), (2, "stderr"))}
STREAMS |= {
    f"/{where}/{number}": number for where in ("dev/fd", "proc/self/fd") for number in (1, 2)
}


def check_output_file(flag: str, path: str | Path, suffixes: Sequence[str] = ()) -> None:
    """Check that a file can be written. The folders above it need not exist yet.

    Args:
        flag: what the message names, such as "--json".
        path: the file; the empty text is refused.
        suffixes: the allowed endings, such as (".png", ".svg"); empty: any.

    Raises:
        ConfigError: one line that names the flag and the reason.
    """
    text = _checked(flag, path)
    path = Path(path)
    if not path.name:  # "", "." and "/"
        raise ConfigError(f"{flag} must name a file, got {text!r}")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{flag} must end with {', '.join(suffixes)}, got {text}")
    with one_line(flag, path):
        there = _is_there(path)
        if path.is_dir():
            raise ConfigError(f"{flag} {text}: is a folder, not a file")
        if any(map(_is_of_a_run, (path, Path(os.path.realpath(path))))):
            raise ConfigError(f"{flag} {text}: is a file of a run or a model; take another name")
        if not there:
            _check_can_make(flag, path, path.parent)
        elif not os.access(path, os.W_OK):
            raise ConfigError(f"{flag} {text}: cannot be written (no permission)")
        check_not_among_checkpoints(flag, path)


def check_is_not_read(flag: str, path: Path, read: Iterable[str]) -> None:
    """Raise ConfigError if a file to write is one of those that are read, and would be lost."""
    for name in map(str.strip, read):
        if name and Path(name).is_file() and path.exists() and path.samefile(name):
            raise ConfigError(f"{flag} {path}: is a file that this command reads; take another")


def check_apart(paths: Mapping[str, Path | None]) -> None:
    """Raise ConfigError if two flags name one file, of which the second would replace the first."""
    named: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/stdout
            continue
        if (first := named.setdefault(os.path.realpath(path), flag)) != flag:
            raise ConfigError(f"{first} and {flag} name one file, {path}; take another")


def check_output_folder(flag: str, path: str | Path) -> None:
    """Check that files can be written into a folder, which need not exist yet.

    Raises ConfigError, one line that names the flag and the reason. The empty text is refused, but
    `Path("")` is `Path(".")`: give the text where a user may leave it empty.
    """
    text = _checked(flag, path)
    if not text:
        raise ConfigError(f"{flag} must name a folder, got {text!r}")
    with one_line(flag, Path(path)):
        check_not_among_checkpoints(flag, Path(path))
        _check_can_make(flag, Path(path), Path(path))


def write_output(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Make the folder of `path`, then write the file whole or not at all.

    `write` gets a temporary path with the same ending, which replaces `path` once it is complete.
    Raises ConfigError, one line that names the flag, if the disk is full or the folder has gone.
    """
    with one_line(flag, path):
        if (stream := STREAMS.get(str(path))) is not None:
            # by its number: opened by its name, a file that it goes to would lose what it has
            with tempfile.TemporaryDirectory() as folder:
                write(aside := Path(folder, f"output{path.suffix}"))
                with open(os.dup(stream), "wb") as file:
                    file.write(aside.read_bytes())
            return
        if path.exists() and not path.is_file():  # a pipe: there is nothing to keep
            write(path)
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".partial-{os.getpid()}{path.suffix}")
        try:
            write(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def one_line(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the flag and the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{flag} {path}: cannot be written ({reason})") from None


def _checked(flag: str, path: str | Path) -> str:
    """The path as text. Raises ConfigError if no file can have this name."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{flag} {text!r}: is not valid UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{flag} {text!r}: has a NUL character")
    check_home(flag, Path(path))
    return text


def _is_of_a_run(path: Path) -> bool:
    """Whether a path is that of a file of a run or a model, in a run's folder also of one to come.

    A run that continues would take what it finds there for its own.
    """
    if any(above.name in FOLDERS and is_run(above.parent) for above in path.parents):
        return True
    own = path.name in OF_A_RUN_OR_MODEL or path.suffix in (".pt", ".safetensors")
    return own and (is_run(path.parent) or _is_there(path))


def _is_there(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists, raises OSError for a name that is too long."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_can_make(flag: str, path: Path, folder: Path) -> None:
    """Check that the folder, or the nearest one above it that exists, takes new entries."""
    nearest = next(filter(_is_there, (folder, *folder.parents)), Path("/"))
    if not nearest.is_dir():
        raise ConfigError(f"{flag} {path}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: cannot be written (no permission in {nearest})")
    # some file systems take no new files, although the permissions say so
    tempfile.TemporaryFile(dir=nearest).close()
    longest = os.pathconf(nearest, "PC_NAME_MAX")  # in bytes
    if any(len(part.encode()) > longest for part in path.parts):
        raise ConfigError(f"{flag} {path}: cannot be written (File name too long)")

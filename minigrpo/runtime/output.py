"""Check where results will be written before any work, so that a bad path costs no results."""

from pathlib import Path

from .flags import ConfigError


def writable_file(flag: str, path: str | Path) -> Path:
    """A file that can be written; its folders are made, the file itself is not.

    Raises ConfigError in one line, which names `flag`, if it cannot be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{flag} {_shown(path)}: is a folder, and must be a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):  # appends nothing, so a file that is there keeps its contents
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _complaint(flag, path, error) from None
    return path


def writable_folder(flag: str, path: str | Path) -> Path:
    """A folder that is there, or can be made, and takes new files; the check leaves nothing behind.

    Raises ConfigError in one line, which names `flag`, if it is not.
    """
    path, made = Path(path), list[Path]()
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_dir():
                folder.mkdir()
                made.append(folder)
        probe = path / ".can-be-written"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        raise _complaint(flag, path, error) from None
    finally:
        for folder in reversed(made):
            folder.rmdir()
    return path


def _complaint(flag: str, path: Path, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"{flag} {_shown(path)}: cannot be written ({reason})")


def _shown(path: Path) -> str:
    """The path on one line, also if it has line breaks or bytes that are not UTF-8."""
    text = str(path)
    return text if text.isprintable() else repr(text)

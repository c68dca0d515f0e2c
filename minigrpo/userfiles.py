"""Users' files, each of which becomes a real module and is run once in a process.

The module's name contains its path: /home/me/rewards.py is `minigrpo.userfiles./home/me/rewards`.
So it hides no other module, and a worker process that unpickles one of its functions finds it.
"""

import hashlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from .errors import ConfigError, error_text

PREFIX = f"{__name__}."
SUFFIX = ".py"
# folders of code that is not the user's: this package, and installed ones
LIBRARIES = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
SITES = (*site.getsitepackages(), site.getusersitepackages())
INSTALLED = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, *LIBRARIES, *SITES))
__path__: list[str] = []  # makes this module a package, so that others may lie below it


class UserFileFinder:
    def find_spec(
        self,
        fullname: str,
        path: object,
        target: object = None,
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        return spec_from_file_location(fullname, unquote(fullname.removeprefix(PREFIX)) + SUFFIX)


sys.meta_path.append(UserFileFinder())
_read: dict[str, str] = {}  # file -> its sha256 when it was first read


def load_file(path: str | Path) -> ModuleType:
    """Run a Python file as a module, and return it. Errors in it are raised as they are."""
    file = Path(path).resolve(strict=True)
    if file.suffix != SUFFIX:
        raise ConfigError(f"{path}: is not a Python file, FILE.py")
    for module in [*sys.modules.values()]:  # another file may have imported it
        if getattr(module, "__file__", None) == str(file):
            now = sha256_of(file)
            if _read.get(str(file), now) != now:
                raise ConfigError(f"{path}: has changed since this process read it: start anew")
            return module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing that is installed
    quoted = quote(str(file.with_suffix(""))).replace(".", "%2E")  # dots separate modules
    with refusing_exit(ConfigError):
        module = import_module(PREFIX + quoted)
    if file.stem.isidentifier() and file.stem not in sys.modules:
        plain = find_spec(file.stem)
        if plain and plain.origin == str(file):  # other files of the folder import it so
            sys.modules[file.stem] = module
    files_read()
    return module


def files_read() -> dict[str, str]:
    """The files of users' modules, with the sha256 when each was loaded."""
    for module in [*sys.modules.values()]:
        attributes = getattr(module, "__dict__", {})  # without a module's own `__getattr__`
        file = str(attributes.get("__file__"))
        if not os.path.isabs(file) or file.startswith(INSTALLED):
            continue
        if file not in _read:
            _read[file] = sha256_of(file)
    return _read.copy()


def sha256_of(file: str | Path) -> str:
    """The sha256 of a file; "" if there is none, such as for a module inside an archive."""
    if not os.path.isfile(file):
        return ""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load_name(flag: str, setting: str) -> Any:
    """The object that FILE.py:NAME names. Raises ConfigError if there is none."""
    file, _, name = setting.rpartition(":")
    if not file:
        raise ConfigError(f"{flag} {setting}: give FILE.py:NAME")
    module = load_file(file)
    if not hasattr(module, name):
        raise ConfigError(f"{flag} {setting}: {file} does not define {name or 'an empty name'}")
    return getattr(module, name)


def name_of(function: Any) -> str:
    """The name of a function, also inside partials, or of the class of a callable object."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def place_of(error: BaseException) -> str:
    """The line of users' code that raised an error, such as `rewards.py, line 12: `, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", *INSTALLED))]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}: " if theirs else ""


def failure(error: BaseException) -> str:
    """An error of users' code in one line: its place, its type and its message."""
    return f"{place_of(error)}{error_text(error):.200}"


@contextmanager
def refusing_exit(error_type: type[Exception]) -> Iterator[None]:
    """Make `sys.exit` in users' code an error, or a run would end as if it had finished."""
    try:
        yield
    except SystemExit as error:
        raise error_type(f"{place_of(error)}sys.exit({error.code!r})") from error

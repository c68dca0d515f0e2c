"""Users' files with tasks, rewards, losses, environments and tools.

A file is a real module, run once in a process, whoever asks for it: dataclasses and annotations in
it find their names, and a model that it loads at the top is loaded once. It may import other files
of its folder.

Its name says where it is: /home/me/rewards.py is the module `minigrpo.userfiles./home/me/rewards`.
So it hides no other module, and a worker process that unpickles one of its functions finds it.
"""

import hashlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
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
# code that is not the user's: this package, and whatever is installed
LIBRARIES = [*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), *site.getsitepackages()]
FOLDERS = (Path(__file__).parent, *LIBRARIES, site.getusersitepackages())
INSTALLED = tuple(f"{folder}{os.sep}" for folder in FOLDERS)
__path__: list[str] = []  # modules may lie below this one, as if it were a package


class UserFileFinder:
    """Finds the file of a module by its name."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        return spec_from_file_location(fullname, unquote(fullname.removeprefix(PREFIX)) + SUFFIX)


sys.meta_path.append(UserFileFinder())
# (a file, the id of a module's spec) -> that spec, and the sha256 of the file
_read: dict[tuple[str, int], tuple[object, str]] = {}
# files that only worker processes have read, and the sha256 that the first of them found
_read_elsewhere: dict[str, str] = {}


def load_file(path: str | Path) -> ModuleType:
    """The module of a Python file. It is run: trust it. An error in it is raised as it is."""
    file = Path(path).resolve(strict=True)
    if file.suffix != SUFFIX:
        raise ConfigError(f"{path}: is not a Python file, FILE.py")
    for module in [*sys.modules.values()]:  # perhaps another file has imported it
        if getattr(module, "__file__", None) == str(file):
            return module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing that is installed
    # names of modules are parted by dots
    with refusing_exit(ConfigError):
        module = import_module(PREFIX + quote(str(file.with_suffix(""))).replace(".", "%2E"))
    if file.stem.isidentifier() and file.stem not in sys.modules:
        plain = find_spec(file.stem)
        if plain and plain.origin == str(file):  # what other files of the folder import
            sys.modules[file.stem] = module
    files_read()
    return module


def files_read() -> dict[str, str]:
    """The files of the users' modules that are loaded, and the sha256 of each as it was then.

    Those that worker processes have loaded are among them: see `changed_files`.
    The script that was started is left out: it changes for a resume, and functions in it are
    compared by their code.
    """
    for name, module in [*sys.modules.items()]:
        said = getattr(module, "__dict__", {})  # not an attribute that a module may make up
        file = str(said.get("__file__"))
        if name == "__main__" or not os.path.isabs(file) or file.startswith(INSTALLED):
            continue
        spec = said.get("__spec__")  # a new one if it is loaded again, as in a notebook
        if (file, id(spec)) not in _read:
            _read[file, id(spec)] = spec, sha256_now(file)
    return _read_elsewhere | {file: digest for (file, _), (_, digest) in _read.copy().items()}


def defined_in(thing: Any) -> str:
    """The sha256 of the user's file that defines a function or class; "" of other code."""
    module = sys.modules.get(getattr(innermost(thing), "__module__", ""))
    return files_read().get(getattr(module, "__file__", None) or "", "")


def script_read() -> dict[str, str]:
    """The sha256 of the file that Python was started with; empty in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return {"the script": sha256_now(file)} if file else {}


def files_now() -> dict[str, str]:
    """The same files, as they are now."""
    return {file: sha256_now(file) for file in files_read()}


def changed_files(others: Mapping[str, str]) -> list[str]:
    """Which files are not as they were read; `others`: read now, or by another process.

    Files that are new here are taken down, and compared from then on.
    """
    known = files_read()
    changed = []
    for file, digest in others.items():
        first = known.get(file) or _read_elsewhere.setdefault(file, digest)
        if first != digest:
            changed.append(file)
    return changed


def sha256_now(file: str) -> str:
    """The sha256 of a file; "" if there is none, as of a module inside an archive."""
    return sha256_of(file) if os.path.isfile(file) else ""


def sha256_of(file: str | Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load_name(flag: str, setting: str) -> Any:
    """What FILE.py:NAME means. Raises ConfigError if there is none."""
    file, _, name = setting.rpartition(":")
    if not (file and hasattr(module := load_file(file), name)):
        raise ConfigError(f"{flag} {setting}: there is none; give FILE.py:NAME")
    return getattr(module, name)


def innermost(function: Any) -> Any:
    """What is called in the end, inside partials."""
    while isinstance(function, partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """The name of a function, also inside partials; of an object that is called, its class's."""
    inner = innermost(function)
    return getattr(inner, "__name__", type(inner).__name__)


def place_of(error: BaseException) -> str:
    """Where a user's code raised an error, such as `rewards.py, line 12: `; "" if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", *INSTALLED))]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}: " if theirs else ""


def failure(error: BaseException) -> str:
    """An error of users' code in a line: where it was raised, its type and what it says."""
    return f"{place_of(error)}{error_text(error):.200}"


@contextmanager
def refusing_exit(kind: type[Exception]) -> Iterator[None]:
    """Make `sys.exit` in users' code an error: a run would end as if it had finished."""
    try:
        yield
    except SystemExit as error:
        raise kind(f"{place_of(error)}sys.exit({error.code!r})") from error

"""What Python's audit hooks refuse to a candidate, on every system.

A hook sees a call before it happens, and it cannot be removed. It holds code that means no harm and
does some. It holds no attacker: see the package's docstring.
"""

import os
import posix
import signal
import sys
from collections.abc import Callable
from typing import Any

MOST_OPENED = 64  # files that a candidate may open for writing, of 1 MiB each
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# how the names of refused events begin
REFUSED = (
    # processes and signals
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "subprocess."),
    *("pty.", "signal.pthread_kill", "resource.", "sys.remote_exec"),
    # C code
    "ctypes.",
    # the network
    *("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser."),
    # files, apart from opening and removing them
    *("os.rename", "os.link", "os.symlink", "os.truncate", "os.mkdir", "os.rmdir", "os.ch"),
    *("os.fchdir", "os.utime", "os.setxattr", "os.removexattr", "os.lockf", "fcntl.", "shutil."),
    *("sqlite3.", "dbm.", "syslog."),
)
# modules whose functions raise no event
REFUSED_MODULES = {"ctypes", "_ctypes", "_posixsubprocess", "_posixshmem", "_multiprocessing"}
REFUSED_MODULES |= {"_dbm", "_gdbm", "_sqlite3", "readline", "termios", "syslog"}
# another interpreter in this process has no hooks
REFUSED_MODULES |= {"_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi"}
# functions that raise no event; those of scheduling can slow down the judge of all later candidates
REFUSED_FUNCTIONS = {
    posix: (
        *("mkfifo", "mknod", "pidfd_open", "unshare", "setns", "memfd_create", "setpriority"),
        *("sched_setaffinity", "sched_setscheduler", "sched_setparam"),
    ),
    signal: ("pidfd_send_signal",),
}


def refuse_harm(folder: str) -> None:
    """Refuse from now on, with PermissionError, what would reach outside this process.

    Args:
        folder: absolute; the only place in which files may be written or removed.
    """
    for name in REFUSED_MODULES & sys.modules.keys():
        del sys.modules[name]
    for module, names in REFUSED_FUNCTIONS.items():
        for place in (module, os):
            for name in names:
                if hasattr(place, name):
                    delattr(place, name)
    sys.addaudithook(_hook(folder + "/"))


def _hook(inside: str) -> Callable[[str, tuple[Any, ...]], None]:
    # captured, because a candidate may replace builtins and the names of this module
    text, data, number, kind_of, error = str, bytes, int, type, PermissionError
    refused, modules, writes, nothing = REFUSED, frozenset(REFUSED_MODULES), WRITES, os.devnull
    opened, most = 0, MOST_OPENED

    def is_inside(path: Any) -> bool:
        if kind_of(path) is data:
            path = text(path, "utf-8", "surrogateescape")
        # an object may be another path each time that it is asked
        if kind_of(path) is not text or ".." in path.split("/"):
            return False
        # the current folder cannot be changed, and there are no links in it
        return not path.startswith("/") or path.startswith(inside)

    def check_open(path: Any, mode: Any, flags: int) -> None:
        nonlocal opened
        if kind_of(path) is number or path == nothing:
            return
        to_write = flags & writes or (mode is not None and mode.strip("rbtU"))
        # os.open has no mode; it can open a folder, and paths that begin there are not seen
        if (to_write or mode is None) and not is_inside(path):
            raise error("a candidate may not open this file to write")
        opened += 1 if to_write else 0
        if opened > most:
            raise error("a candidate may not write so many files")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            check_open(*args)
        elif event == "os.remove":
            if not is_inside(args[0]) or args[1] != -1:
                raise error("a candidate may not remove this file")
        elif (event == "import" and args[0] in modules) or event.startswith(refused):
            raise error("a candidate may not use this")

    return hook

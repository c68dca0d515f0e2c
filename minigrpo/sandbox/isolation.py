"""What Linux holds a process to: namespaces, limits, capabilities, and who reaps whom.

Python 3.11 has no functions for most of this, so libc is called through ctypes.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from .wire import FILES, NETWORK, PROCESSES

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000
CLONE_NEWPID, CLONE_NEWNET = 0x2000_0000, 0x4000_0000
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x4_0000, 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x2008_0522

MIB = 2**20
JUDGE_MIB = 1024  # of a worker: a test may make a list of what a candidate returns
FOLDER = b"size=64m,nr_inodes=4096,mode=700"  # of all candidates of a worker, in memory


def enter_namespaces(folder: str) -> list[str]:
    """Leave the system's network, processes and files behind; return what was left.

    Processes forked from now on have numbers of their own, and cannot see or signal others. Files
    become read-only, and `folder` becomes a file system in memory, which ends with the process.
    Nothing is left where the system allows no namespaces.
    """
    # tried in a process that ends, because half of the way cannot be gone back
    if not _succeeds(folder, read_only=False):
        return []
    read_only = _succeeds(folder, read_only=True)
    _enter(folder, read_only)
    return [NETWORK, PROCESSES, *([FILES] if read_only else [])]


def _succeeds(folder: str, read_only: bool) -> bool:
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            _enter(folder, read_only)
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _enter(folder: str, read_only: bool) -> None:
    """Raises OSError where the system does not allow it."""
    libc, user, group = _libc(), os.getuid(), os.getgid()
    others = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if libc.unshare(CLONE_NEWUSER | others) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    else:  # root may be allowed to without a user namespace
        _check(libc.unshare(others))
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        where = ctypes.c_int(AT_FDCWD), b"/", ctypes.c_uint(AT_RECURSIVE)
        _check(libc.syscall(SYS_MOUNT_SETATTR, *where, attributes, size))
    _check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, FOLDER))


def unmount(folder: str) -> None:
    """Take back what `enter_namespaces` made of the folder, if anything."""
    _libc().umount2(folder.encode(), MNT_DETACH)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents have ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have the system kill this process when the process that forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Keep other processes of the same user from reading or changing this one's memory."""
    _prctl(PR_SET_DUMPABLE, 0)


def be_killed_first() -> None:
    """Have the system kill this process before others when memory runs out, not the training."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def give_up_privileges() -> None:
    """Give up root's rights over files and limits, and any way to get them back."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(_libc().capset(header, nothing))


def limit_memory() -> None:
    """Limit a worker: without a limit, `set(f())` of an endless range takes all of the memory."""
    _limit({resource.RLIMIT_AS: JUDGE_MIB * MIB})


def limit_resources(cpu_s: int) -> None:
    """Limit what a candidate may use; the limits cannot be raised afterwards."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: 512 * MIB,
        resource.RLIMIT_FSIZE: MIB,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 16,  # the system does not hold root to this one
        resource.RLIMIT_CORE: 0,
    }
    _limit(limits)


def _limit(limits: Mapping[int, int]) -> None:
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))


def children() -> list[int]:
    """The processes whose parent is this one."""
    found, me = list[int](), str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            # after the name, in brackets, which may hold anything: state and parent
            if Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(name))
    return found


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def forget_libc() -> None:
    """Drop the functions of libc that were used here: no audit hook sees a call of one of them."""
    _libc.cache_clear()


def _prctl(option: int, value: int) -> None:
    numbers = (ctypes.c_ulong(x) for x in (value, 0, 0, 0))
    _check(_libc().prctl(option, *numbers))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

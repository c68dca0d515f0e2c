"""A worker of the sandbox: it forks a process for each program, and ends it.

The worker is started by its path, so it imports only the standard library. It never reads a program
or a test: the trainer gets a connection to each forked process. Anything that a program sends there
is a value that it could have returned, so nothing in its process has to be safe from it.
"""

import builtins
import ctypes
import errno
import fcntl
import json
import math
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

globals()["__builtins__"] = vars(builtins).copy()  # a program may replace functions of `builtins`

LARGEST = 2 << 20  # most bytes of a message
CONTAINERS: dict[str, Any] = {each.__name__: each for each in (list, tuple, dict, frozenset)}
LIMITS = {"AS": 512 << 20, "FSIZE": 0, "NOFILE": 64, "CORE": 0}
READS = os.O_RDONLY | os.O_CLOEXEC  # the flags of `open` for reading
# Modules whose audit events are refused: processes and signals, C code, the network, files apart
# from opening and listing them, and the objects of this process.
REFUSED = "ctypes fcntl gc os pty resource signal socket sqlite3 subprocess"
# Modules with C libraries in folders that a program may be unable to read. They are loaded before.
LINKED = "_bz2 _crypt _curses _decimal _lzma _sqlite3 _ssl _uuid _zstd pyexpat readline zlib"
# system calls that a program may make: to compute, import, wait, use threads, and answer
CALLS = (
    "access alarm brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 epoll_create1"
    " epoll_ctl epoll_pwait epoll_wait exit exit_group faccessat faccessat2 fstat futex getcwd"
    " getdents64 getegid geteuid getgid getgroups getitimer getpgrp getpid getppid getrandom"
    " getrlimit getrusage getsid gettid gettimeofday getuid lseek lstat mmap mprotect mremap munmap"
    " nanosleep newfstatat pause pipe pipe2 poll ppoll pread64 pselect6 read readlink readlinkat"
    " readv recvfrom restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn"
    " rt_sigtimedwait sched_getaffinity sched_yield select set_robust_list setitimer sigaltstack"
    " stat statx sysinfo time times umask uname write writev"
)
# Further calls, which are allowed if an argument under a mask has a value. Each entry is (name,
# number of the argument, mask, value).
WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000
INT = 2**32 - 1
POINTER = 2**64 - 1
LIMITED_CALLS = (
    ("clone", 0, CLONE_THREAD, CLONE_THREAD),  # a thread, not a process
    ("fcntl", 1, INT - 7, 0),  # the first commands; a later one lets a descriptor send signals
    ("fcntl", 1, INT, fcntl.F_DUPFD_CLOEXEC),
    ("madvise", 2, INT - 63, 0),  # later advice, for root, marks memory of the machine as broken
    ("open", 1, WRITES, 0),
    ("openat", 2, WRITES, 0),
    ("prlimit64", 2, POINTER, 0),  # without a new limit, so it reads one
    ("sendto", 4, POINTER, 0),  # without an address, so to the trainer
)
# Landlock's system calls have the same numbers on all machines
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
ASK_VERSION = 1
PATH_BENEATH = 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SCMP_ACT_ERRNO = 0x50000
SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_CMP_MASKED_EQ = 7


def encode(value: Any) -> object:
    """A plain value as JSON; a subclass, such as a Counter, as its base. Else raises TypeError."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Set):  # the views of a dict are sets too
        value = frozenset(value)
    for name, container in CONTAINERS.items():
        if isinstance(value, container):
            contents = value.items() if container is dict else value
            return {name: [encode(part) for part in contents]}
    raise TypeError("not a plain value")


def decode_container(form: dict[str, object]) -> object:
    """The container that `encode` turned into an object; its contents are decoded already."""
    [(name, contents)] = form.items()
    return CONTAINERS[name](contents)


def frame(message: object) -> bytes:
    """A message as a line of JSON, which is the form that is sent."""
    return json.dumps(encode(message)).encode() + b"\n"


def receive(stream: BufferedIOBase) -> Any:
    """Read a message. Raises any error if none comes, or a malformed one."""
    return json.loads(stream.readline(LARGEST), object_hook=decode_container)


def hold_files() -> None:
    """Let this process, and all processes that it forks, open files of the library alone.

    Raises OSError if the kernel has no Landlock.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *values: int | bytes | None) -> int:
        words = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
        result: int = libc.syscall(number, *words)
        if result < 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        return result

    version = call(CREATE_RULESET, None, 0, ASK_VERSION)
    rights = 2 ** (15 if version >= 3 else 13) - 1  # a bit for each way to use a file
    rules = call(CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
    for path in filter(os.path.isdir, sys.path):
        folder = os.open(path, os.O_PATH)
        call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", READ_FILE | READ_DIR, folder), 0)
        os.close(folder)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def filter_of_calls() -> Callable[[], None]:
    """A function that forbids its process all system calls but the listed ones, for good.

    libseccomp knows their numbers on each machine. Other calls fail as if the kernel did not have
    them, so that the C library tries an older one. Raises OSError if libseccomp is missing, or the
    kernel does not take filters.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None)
    if ctypes.get_errno() != errno.EFAULT:  # a kernel that takes filters complains of the null
        raise OSError("the kernel does not take filters")
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(SCMP_ACT_ERRNO | errno.ENOSYS))

    def check(result: int) -> None:
        if result:
            raise OSError("libseccomp failed")

    def allow(name: str, *condition: bytes) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this machine does not have the call
            add = seccomp.seccomp_rule_add_array
            check(add(rules, SCMP_ACT_ALLOW, number, len(condition), *condition))

    for name in CALLS.split():
        allow(name)
    for name, argument, mask, value in LIMITED_CALLS:
        allow(name, struct.pack("=IIQQ", argument, SCMP_CMP_MASKED_EQ, mask, value))
    return lambda: check(seccomp.seccomp_load(rules))


def answer_requests(stream: BufferedIOBase, hold_calls: Callable[[], None] | None) -> NoReturn:
    """Run or evaluate one piece of Python after another, until this process is killed.

    A program that looks at the frames of its callers finds neither an earlier answer there nor the
    key that marks an answer, because the key is read after the work.
    """
    seconds = math.ceil(receive(stream))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    # dataclasses whose annotations are texts look for the module of their class
    sys.modules["program"] = ModuleType("program")
    namespace = vars(sys.modules["program"])
    namespace["__builtins__"] = builtins
    random.seed(0)  # a run can be repeated
    if hold_calls:
        hold_calls()
    refuse_harm()
    while True:
        mode, source = receive(stream)
        answer = frame([])
        with suppress(BaseException):
            answer = frame([eval(compile(source, "<program>", mode), namespace)])
        stream.write(frame(receive(stream)) + answer)
        stream.flush()


def refuse_harm() -> None:
    """Make everything that would reach outside this process raise an error from now on."""
    for place in (os, sys.modules["posix"]):
        del place.mkfifo, place.mknod  # no audit event shows these calls
    library = tuple(path + "/" for path in sys.path)
    refused = set(REFUSED.split())

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir"):  # imports read the library
            path = os.path.abspath(os.fsdecode(args[0])) + "/"
            harmless = path.startswith(library) and (event != "open" or args[2] == READS)
        elif event == "import":
            harmless = args[0] != "_posixsubprocess"  # it starts processes without an event
        else:
            harmless = event.partition(".")[0] not in refused
        if not harmless:
            raise PermissionError("a program may not do this")

    sys.addaudithook(hook)


def main(control: socket.socket) -> None:
    """Serve until the trainer has closed the connection; fork while it is busy with answers."""
    # Signals that ask a run to stop do not change verdicts: the run finishes its step first, and
    # programs ignore them too.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    # if memory runs out, the kernel ends this process rather than the trainer
    Path("/proc/self/oom_score_adj").write_text("1000")
    for name in LINKED.split():
        with suppress(ImportError):  # this Python was built without it
            __import__(name)
    compile("", "<nothing>", "exec")  # the first call makes all types of syntax trees
    for name, most in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    os.environ.clear()
    time.tzset()  # reads the machine's time zone from a file that no program can read
    unheld = list[str]()  # what the kernel does not guard, and what it lacks for that
    hold_calls = None
    try:
        hold_calls = filter_of_calls()
    except OSError:
        unheld.append("system calls (libseccomp)")
    try:
        hold_files()
    except OSError:
        unheld.append("files (Landlock)")
    done = b"e"
    while done:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                os.dup2(1, 0)  # in place of the worker's connection
                os.dup2(1, 2)
                theirs.close()
                answer_requests(ours.makefile("rwb"), hold_calls)
            finally:
                os._exit(0)  # runs neither atexit nor finalizers of the program
        ours.close()
        done = b""
        with suppress(OSError), theirs:  # the trainer may have ended
            socket.send_fds(control, [json.dumps(unheld).encode()], [theirs.fileno()])
            done = control.recv(1)  # the trainer has its answers
        os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # its group may not exist yet
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(socket.socket(fileno=0))

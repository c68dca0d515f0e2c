"""The sandbox runs code that a model wrote, and says which of its tests pass.

**The verdict.** For `assert f(2) == 5` the program's process evaluates `f(2)`, and the trainer
compares the value with that of the right side, which a process without the program evaluates. So
only the right value passes, whatever is printed, patched or read from memory. A test of another
form, or with a right side that is not plain (Fraction(3) is not 3 here), runs in the program's
process and trusts it.

**The protection.** Each program has a process and a session of its own, an empty environment, and
limits on time, memory and open files. It may start threads, but it cannot start a process, send a
signal, open a socket, share memory, write a file, or read outside the standard library. The kernel
enforces this even for C code: Landlock (Linux 5.13) for files, and a filter of system calls, made
by libseccomp, for the rest. An audit hook of Python is the second line of defence. If the kernel
lacks one of the two, the first use of the sandbox names what the hook alone refuses.

**Its limits.** Programs share the kernel with the trainer, and may ask which files exist. There are
known ways around an audit hook: alone, it protects a run from accidents, and the reward from some
of the tricks that reinforcement finds. Run code of strangers in a virtual machine.
"""

from .client import run_tests as run_tests

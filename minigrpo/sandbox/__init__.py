"""Runs code that a model wrote, and says which of its tests pass.

**Who decides.** Of `assert f(2) == 5` the process of a program evaluates `f(2)`, and the trainer
compares that with the right side: a literal, or else what a process without the program evaluates.
So only the right value passes, whatever is printed, patched or read from memory, and only a plain
one: Fraction(3) is not 3 here. A test of another form, or whose right side is no plain value, runs
in the program's process and trusts it.

**What is held.** Each program has a process and a session of its own, an empty environment, and
limits on time, memory and open files. It may start threads but no process, send no signal, open no
socket, share no memory, write no file, and read only the standard library. The kernel holds it to
this, also where it reaches C: Landlock (Linux 5.13) is for files, and a filter of system calls,
made by libseccomp, for the rest. An audit hook is the second line. Where the kernel lacks one of
the two, the first use of the sandbox warns of what only the hook refuses.

**What is not held.** Programs share the kernel with the trainer, and may ask which files exist. An
audit hook has known ways around it: alone, it protects a run from accidents, and the reward from
some of what reinforcement finds. Run code of strangers in a virtual machine.
"""

from .client import run_tests as run_tests

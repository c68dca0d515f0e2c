"""Runs code that a model wrote, and says which of its tests pass.

**Who decides.** Of `assert f(2) == 5` the process of a program evaluates the right side before it
loads the program, and `f(2)` after that; the trainer compares the two. So only the right value
passes, whatever is printed or patched, and only a plain one: Fraction(3) is not 3 here. A test of
another form, or whose right side is no plain value, runs in the program's process and trusts it.

**What is held.** Each program has a process and a session of its own, an empty environment, and
limits on time, memory and open files. An audit hook refuses to start processes, send signals, open
sockets, load C code, write files, and to read any but those of the standard library.

**What is not held.** This is no security boundary: audit hooks have known ways around them. They
protect a run from accidents, and the reward from what reinforcement finds. Run code of strangers in
a virtual machine.
"""

from .client import run_tests as run_tests

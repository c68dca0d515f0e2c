"""Runs code that a model wrote, and says which of its tests pass.

    workers.py     in the trainer: warm worker processes, restarted when one breaks
    server.py      a worker: forks two processes per job, and kills what is left afterwards
    judge.py       one of them: reads the job, runs its tests, asks the candidate for values
    candidate.py   the other one: runs the model's code, and answers the judge
    isolation.py   what Linux holds: namespaces, limits, capabilities
    audit.py       what Python's audit hooks hold, where Linux allows no namespaces
    wire.py        messages between these processes

**Who decides.** Tests run in the judge, where no code of a model ever runs. In a test like
`assert f(2) == 5`, `f` is a stand-in: the call goes to the candidate's process as plain values, and
a plain value comes back. The judge compares. The candidate never sees what it is compared with: the
process from which it is forked reads no tests, neither of this job nor of earlier ones. So prints,
exits, patched builtins, `__eq__` that is always True, or a fake reply on the channel decide
nothing: the only way to pass a test is to return the right value. A test that compares two answers
of the candidate, or leaves the comparison to an object of the candidate, trusts the candidate.

**What is held.** Each candidate has a process and a session of its own, an empty environment, a
folder of its own, and limits on CPU seconds, memory, file size, open files and processes. It has a
wall time; then it and everything that it started is killed, `setsid` or not. Where the system
allows namespaces it has no network, sees files outside its folder read-only, and cannot signal
other processes. Everywhere, audit hooks refuse to start processes, send signals, open sockets,
load C code, or change files outside the folder.

**What is not held.** This is no security boundary against an attacker. The candidate may read every
file that the user may read, audit hooks have known ways around them, and a fault of the kernel or
of Python is not covered. It protects a run from what models write by accident, and the reward from
what reinforcement finds. Run code of strangers in a virtual machine.
"""

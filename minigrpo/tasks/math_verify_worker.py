"""The process in which math-verify compares answers; math_judge.py starts it.

It reads a JSON list of two texts per line, the truth and the answer, and writes 1 or 0 per line.
Its argument is the limit per pair, in seconds of CPU time: a busy machine changes no verdict.
It imports nothing of minigrpo, so that it starts without torch.
"""

import json
import os
import resource
import signal
import sys

WAITING = 20  # times the limit, that may pass until a process has had so much of a CPU
MEMORY_BYTES = 2 << 30  # of the process, SymPy included


def main(limit_s: float) -> None:
    """Compare pairs until the input ends."""
    # what a library prints must not look like a verdict
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends the input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        import math_verify
    except Exception as error:
        out.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
        out.flush()
        return
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        truth, answer = json.loads(line)
        # their signals are not handled: they end the process, in the middle of a multiplication too
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, WAITING * limit_s)
        verdict = same(math_verify, truth, answer)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        out.write(f"{int(verdict)}\n")
        out.flush()


def same(library, truth: str, answer: str) -> bool:  # type: ignore[no-untyped-def]
    """Whether the library says that two answers are equal; False for whatever it cannot read."""
    try:
        # its own limits are off: they would replace the timer
        formulas = [f"${text.strip('$ ')}$" for text in (truth, answer)]
        read = [library.parse(formula, parsing_timeout=None) for formula in formulas]
        return bool(library.verify(*read, timeout_seconds=None))
    except Exception:
        return False


if __name__ == "__main__":
    main(float(sys.argv[1]))

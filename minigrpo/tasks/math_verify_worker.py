"""The process in which math-verify compares answers; math.py starts it.

It reads a JSON list of two texts per line, the truth and the answer, and writes 1 or 0 per line.
Its argument is the limit per pair, in seconds of CPU time: a busy machine changes no verdict. It
imports nothing of minigrpo, so that it starts without torch.
"""

import json
import resource
import signal
import sys

MEMORY_BYTES = 2 << 30  # of the process, SymPy included


def main(limit_s: float) -> None:
    """Compare pairs until the input ends."""
    verdicts, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no verdict
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends the input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import math_verify

    for line in sys.stdin:
        # nobody handles its signal: it ends the process, even within one multiplication
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:  # the library's own limits are off: they cannot end a multiplication
            formulas = [f"${text.strip('$ ')}$" for text in json.loads(line)]
            truth, answer = (math_verify.parse(x, parsing_timeout=None) for x in formulas)
            same = bool(math_verify.verify(truth, answer, timeout_seconds=None))
        except Exception:  # an answer that it cannot read
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(same), file=verdicts, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))

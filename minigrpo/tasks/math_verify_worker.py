"""The module of the worker processes in which math-verify compares answers; math.py starts them."""

import os
import resource
import signal
import sys

import math_verify

sys.stdout = sys.stderr = open(os.devnull, "w")
MOST_BYTES = 2 << 30  # memory of the process, SymPy included
# not of the address space, of which a CUDA build of torch alone takes more
resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def same(truth: str, answer: str) -> bool:
    """Whether two formulas are equal. Raises any error for one that cannot be read."""
    # The signal has no handler, so it ends the process, even within one multiplication. The limit
    # is one of CPU time (in seconds), so that a busy machine does not change a verdict.
    signal.setitimer(signal.ITIMER_PROF, 3.0)
    try:  # the library's own limits are off, because they cannot end a multiplication
        texts = [f"${text.strip('$ ')}$" for text in (truth, answer)]
        formulas = [math_verify.parse(text, parsing_timeout=None) for text in texts]
        return bool(math_verify.verify(*formulas, timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

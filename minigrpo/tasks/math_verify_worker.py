"""What the processes in which math-verify compares answers import; math.py starts them."""

import os
import resource
import signal
import sys

import math_verify

sys.stdout = sys.stderr = open(os.devnull, "w")
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # bytes, SymPy included


def same(truth: str, answer: str) -> bool:
    """Whether two formulas are equal. Raises any error for one that cannot be read."""
    # nobody handles its signal: it ends the process, even within one multiplication
    signal.setitimer(signal.ITIMER_PROF, 3.0)  # s of CPU time: a busy machine changes no verdict
    try:  # the library's own limits are off: they cannot end a multiplication
        texts = [f"${text.strip('$ ')}$" for text in (truth, answer)]
        formulas = [math_verify.parse(text, parsing_timeout=None) for text in texts]
        return bool(math_verify.verify(*formulas, timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

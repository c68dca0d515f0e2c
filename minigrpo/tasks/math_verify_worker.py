"""The process in which math-verify compares answers; math.py starts it.

It reads a JSON list of two texts per line, the truth and the answer, and writes 1 or 0 per line. It
imports nothing of minigrpo, so that it starts without torch.
"""

import json
import resource
import signal
import sys

import math_verify

LIMIT_S = 3.0  # of CPU time, per pair: a busy machine changes no verdict
MEMORY_BYTES = 2 << 30  # of the process, SymPy included

verdicts = sys.stdout
sys.stdout = sys.stderr  # what a library prints is no verdict
resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

for line in sys.stdin:
    # nobody handles its signal: it ends the process, even within one multiplication
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:  # the library's own limits are off: they cannot end a multiplication
        texts = [f"${text.strip('$ ')}$" for text in json.loads(line)]
        truth, answer = (math_verify.parse(text, parsing_timeout=None) for text in texts)
        same = bool(math_verify.verify(truth, answer, timeout_seconds=None))
    except Exception:  # an answer that it cannot read
        same = False
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(int(same), file=verdicts, flush=True)

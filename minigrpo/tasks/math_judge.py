"""Decide whether an answer is the true one: numbers here, other formulas with math-verify.

math-verify (the optional extra `math`) compares formulas with SymPy. It may work for hours on a
text such as 9^{9^{9}}, its own time limit needs the main thread, and a multiplication of huge
numbers cannot be interrupted in Python at all. So it runs in processes of its own
(math_verify_worker.py), which the system ends after a few seconds.
"""

import json
import subprocess
import sys
from collections import deque
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from signal import SIGALRM, SIGPROF
from typing import Protocol

from ..runtime.flags import ConfigError
from ..runtime.text import printable
from .math_answers import MAX_ANSWER_CHARS, same_answer

WORKER = Path(__file__).with_name("math_verify_worker.py")
LIMIT_S = 3.0  # of CPU time, per pair of answers
ATTEMPTS = 2  # a worker may be ended by a signal that is none of its business
CACHED = 1 << 14


class Judge(Protocol):
    """Compares final answers."""

    name: str  # what decides, with its version

    def same(self, truth: str, answer: str) -> bool: ...


class Numbers:
    """Compares numbers exactly, and everything else as text without its layout."""

    name = "exact numbers"

    def same(self, truth: str, answer: str) -> bool:
        return bool(same_answer(truth, answer))


class MathVerify:
    """Compares as `Numbers` does, and asks math-verify where that does not decide.

    Threads may share it: each call takes an idle process, or starts one.
    """

    def __init__(self) -> None:
        """Raises ConfigError if math-verify is installed and cannot be imported."""
        self.name = f"exact numbers, math-verify {version('math-verify')} for other formulas"
        self._idle = deque([Worker()])  # its methods are atomic
        # a group has many completions and few answers
        self._verdict = lru_cache(CACHED)(self._ask)

    def same(self, truth: str, answer: str) -> bool:
        known = same_answer(truth, answer)
        if known is None and max(len(truth), len(answer)) <= MAX_ANSWER_CHARS:
            return self._verdict(truth, answer)
        return bool(known)

    def _ask(self, truth: str, answer: str) -> bool:
        """The verdict of a worker; False if it takes too long or needs too much memory."""
        for _ in range(ATTEMPTS):
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = Worker()
            verdict = worker.ask(truth, answer)
            if verdict is not None:
                self._idle.append(worker)
                return verdict
            if worker.ended_by_its_limit():
                break
        return False


class Worker:
    """A process that compares one pair of answers after another."""

    def __init__(self) -> None:
        # -P: the folder of the script would hide modules of the standard library behind ours
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(LIMIT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        assert self.process.stdin and self.process.stdout
        self.questions, self.answers = self.process.stdin, self.process.stdout
        if (said := self.answers.readline().strip()) != "ready":
            self.process.wait()
            reason = printable(said)[:200] or f"its process ended with {self.process.returncode}"
            raise ConfigError(
                f"--task math: math-verify is installed and cannot be used ({reason}); mend it "
                "with pip install 'minigrpo[math]', or uninstall it"
            )

    def ask(self, truth: str, answer: str) -> bool | None:
        """Whether math-verify says that two answers are equal; None if the process has ended."""
        try:
            self.questions.write(json.dumps([truth, answer]) + "\n")
            self.questions.flush()
            return {"1\n": True, "0\n": False}.get(self.answers.readline())
        except OSError:
            return None

    def ended_by_its_limit(self) -> bool:
        """Whether the process was ended for being too slow; it is not used after this."""
        self.process.kill()  # does nothing to one that has ended
        return self.process.wait() in (-SIGPROF, -SIGALRM)


def make_judge() -> Judge:
    """math-verify where it is installed, else exact numbers.

    Raises ConfigError if it is installed and cannot be imported.
    """
    try:
        return MathVerify() if find_spec("math_verify") else Numbers()
    except PackageNotFoundError:  # a module of that name that is not the package
        return Numbers()

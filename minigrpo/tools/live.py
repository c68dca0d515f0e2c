"""The doctor while a run goes: what is urgent is said at once, and each finding once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..runtime.flags import ConfigError
from .diagnosis import RULES, diagnose
from .run_data import RunData, read_run

EVERY = 20  # steps between two looks
# What wastes the rest of a run; the other rules can wait for its end. Groups without a signal and
# texts that are cut off are watched by the trainer itself.
URGENT = {
    name: RULES[name]
    for name in (
        "entropy collapses",
        "entropy explodes",
        "KL runs away",
        "sampler gap",
        "falls",
        "memory",
    )
}


class LiveDoctor:
    """A listener of a run's log."""

    def __init__(self, folder: Path, warn: Callable[[str], object]) -> None:
        self.folder, self.warn = folder, warn
        self.run: RunData | None = None  # read at the first step: a resumed run has earlier ones
        self.said: set[str] = set()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.metrics.append({"step": step, **values})
        else:
            try:
                self.run = read_run(self.folder)
            except ConfigError:  # a full disk: the next step tries again
                return
        if step % EVERY == 0:
            self._ask(step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.evaluations.append({"step": step, **values})

    def sample(self, step: int, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def _ask(self, step: int) -> None:
        assert self.run is not None
        for finding in diagnose(self.run, URGENT):
            if finding.rule not in self.said:
                self.said.add(finding.rule)
                self.warn(f"step {step}: {finding.what} {finding.evidence}. {finding.advice}")

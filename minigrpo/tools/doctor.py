"""Say what is wrong with a run, and what to do about it.

minigrpo doctor RUN

It also works while the run is going. The rules and their thresholds are a table in diagnosis/.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from .diagnosis import NOTES, RULES, Finding, diagnose, not_judged
from .messages import one_line_errors
from .run_data import RunData, read_run


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""

    def check(self) -> None:
        if not self.runs:
            raise ConfigError("minigrpo doctor needs the folder of at least one run")


def show(screen: Screen, run: RunData) -> None:
    """Print the findings on a run, or that there are none."""
    findings, steps = diagnose(run), len(run.metrics)
    if not findings:
        screen.say(
            f"doctor: {len(RULES)} rules find nothing wrong in {steps} steps{not_judged(run)}"
        )
    for finding in findings:
        _show(screen, finding, "bold yellow")
    for note in diagnose(run, NOTES):
        _show(screen, note, "bold")


def _show(screen: Screen, finding: Finding, style: str) -> None:
    screen.say(f"doctor: {finding.what}", style=style, wrap=True)
    screen.say(f"{finding.evidence}. {finding.advice}", wrap=True)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo doctor")
        arguments.check()
        screen = Screen(has_result=True)
        for folder in arguments.runs:
            run = read_run(folder, screen.warn)
            if len(arguments.runs) > 1:
                screen.say(f"{folder}:")
            show(screen, run)


if __name__ == "__main__":
    main()

"""summary.json: how a run ended. It is there only once the run, or this part of it, has ended."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .failures import reason_of
from .files import to_json, write_whole
from .job_summary import write_job_summary
from .text import parse_json

SUMMARY = "summary.json"


def take_earlier_seconds(run: Path, step: int) -> float:
    """Remove the summary of an earlier part, and return how long the parts up to `step` took.

    NaN if that is not known, because the earlier part was killed. The summary is removed because it
    would say of this part, if that is killed, how the earlier one ended.
    """
    try:
        summary = parse_json((run / SUMMARY).read_text())
        seconds = float(summary["wall_seconds"]) if summary["step"] == step else math.nan
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        seconds = math.nan
    with contextlib.suppress(OSError):
        (run / SUMMARY).unlink(missing_ok=True)
    return seconds if step else 0.0


def write_summary(
    run: Path, summary: Mapping[str, Any], processes: int, warn: Callable[[str], object]
) -> None:
    """Write the summary, and that of a SLURM job; if that is not possible, warn, and leave none."""
    file = run / SUMMARY
    try:
        write_whole(file, lambda aside: aside.write_text(to_json(summary, indent=1)))
    except OSError as error:
        with contextlib.suppress(OSError):  # of an earlier part, it would say how that ended
            file.unlink(missing_ok=True)
        warn(f"{file}: NOT WRITTEN ({reason_of(error)})")
    write_job_summary(run, summary, processes, warn)

"""What a SLURM job leaves in its run's folder for people: `job_summary.txt`, a few plain lines."""

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from .failures import reason_of
from .files import write_whole
from .measures import SAMPLED, headline, in_words, number_of, sizes

JOB_SUMMARY = "job_summary.txt"
JOB, NODES, RESTARTS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"


def write_job_summary(
    folder: Path, summary: Mapping[str, Any], processes: int, warn: Callable[[str], object]
) -> None:
    """Write the file, in a SLURM job only; if that is not possible, warn.

    Args:
        summary: what summary.json holds.
    """
    if not (job := os.environ.get(JOB)):
        return
    seconds = summary["wall_seconds"]
    time = str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "unknown"
    rows = {
        "job": f"{job}, restart {os.environ.get(RESTARTS, '0')}",
        "nodes": f"{os.environ.get(NODES, 'unknown')}, {processes} processes",
        "status": f"{summary['status']} ({summary['exit_reason']})",
        "steps": f"{summary['step']}, of which {summary['skipped_steps']} were skipped",
        "time": time,
        **_change(summary["first_evaluation"], summary["last_evaluation"]),
    }
    text = "".join(f"{name:<10} {value}\n" for name, value in rows.items())
    file = folder / JOB_SUMMARY
    try:
        write_whole(file, lambda aside: aside.write_text(text, "utf-8"))
    except OSError as error:
        warn(f"{file}: NOT WRITTEN ({reason_of(error)})")


def _change(first: Mapping[str, float] | None, last: Mapping[str, float] | None) -> dict[str, str]:
    """The headline before and after."""
    if not (first and last):
        return {}
    name = headline(last)
    before, after = first.get(name + SAMPLED), last.get(name + SAMPLED)
    if not isinstance(before, float) or not isinstance(after, float):  # a resumed log may lack it
        return {}
    what = f"{in_words(name)}, sampled"
    n = sizes(number_of(first), number_of(last))
    return {"held out": f"{what}: {before:.3f} before, {after:.3f} after, n = {n}"}

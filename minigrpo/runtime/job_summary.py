"""What a SLURM job leaves in its run's folder for people: `job_summary.txt`, a few plain lines."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from .measures import SAMPLED, headline, in_words

JOB, NODES, RESTARTS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"


def job_summary(
    summary: Mapping[str, Any], processes: int, environ: Mapping[str, str] = os.environ
) -> str:
    """The text, or "" outside SLURM.

    Args:
        summary: what summary.json holds.
    """
    if not (job := environ.get(JOB)):
        return ""
    rows = {
        "job": f"{job}, restart {environ.get(RESTARTS, '0')}",
        "nodes": f"{environ.get(NODES, 'unknown')}, {processes} processes",
        "status": f"{summary['status']} ({summary['exit_reason']})",
        "steps": f"{summary['step']}, of which {summary['skipped_steps']} were skipped",
        "time": str(timedelta(seconds=round(summary["wall_seconds"]))),
        **_change(summary["first_evaluation"], summary["last_evaluation"]),
    }
    return "".join(f"{name:<10} {text}\n" for name, text in rows.items())


def _change(first: Mapping[str, float] | None, last: Mapping[str, float] | None) -> dict[str, str]:
    """The headline before and after."""
    if not (first and last):
        return {}
    name = headline(last)
    before, after = first.get(name + SAMPLED), last.get(name + SAMPLED)
    if not isinstance(before, float) or not isinstance(after, float):  # a resumed log may lack it
        return {}
    what = f"{in_words(name)}, sampled"
    return {"held out": f"{what}: {before:.3f} before, {after:.3f} after, n = {last['n']:.0f}"}

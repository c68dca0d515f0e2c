"""Estimate the cost of one training step without running it: `minigrpo plan [flags of train]`.

`minigrpo train --plan` prints the same table; under torchrun, the table is for each process. With
`--device cuda` it plans for a CUDA card that this machine need not have, then without seconds. A
published model need not be here either.
"""

from collections.abc import Sequence

from ..config import Config
from ..runtime.distributed import DistContext
from ..runtime.logging import Screen
from ..runtime.machine import memory_limit_mib
from ..runtime.planned_job import PlannedJob
from ..runtime.planner import Planner
from .messages import one_line_errors

CARDS = 12, 24  # GB of common cards
SPARE_MIB = 1024  # for CUDA itself, and for gaps between allocations that are too small to use


def print_plan(config: Config, dist: DistContext) -> None:
    """Print the estimates of one step, from the main process. Raises ValueError in one line."""
    planner = Planner(config, dist)
    if not dist.is_main:
        return
    screen, job = Screen(has_result=True), planner.job
    found = planner.estimates()
    each = f", in each of {dist.world_size} processes" if dist.world_size > 1 else ""
    names = list(reversed(found))  # the most likely first
    cells = [found[name].cells() for name in names]
    rows = list(dict.fromkeys(row for column in cells for row in column))
    table = [[row, *(column.get(row, "") for column in cells)] for row in rows]
    screen.table(f"estimate for one step{each}", ["", *names], table)
    if job.assumed:
        screen.say(job.assumed)
    _say_what_is_measured(screen, job)
    _say_what_fits(screen, job, found[names[0]].peak_mib)


def _say_what_is_measured(screen: Screen, job: PlannedJob) -> None:
    kind = "GPU memory" if job.device.type == "cuda" else "memory besides the program itself"
    seconds = "on this machine, by probes of the model's own sizes"
    if not job.is_here:
        seconds = "left out, because this machine has no CUDA device to measure them on"
    screen.say(f"MiB: {kind}. seconds: {seconds}.")


def _say_what_fits(screen: Screen, job: PlannedJob, peak: float) -> None:
    """`peak` in MiB. What does not fit on this machine is a warning."""
    if job.device.type == "cuda":
        cards = (f"{'fits' if fits(peak, size) else 'does not fit'} in {size} GB" for size in CARDS)
        spare = f"{SPARE_MIB / 1024:g} GiB for CUDA itself"
        screen.say(f"peak of {peak / 1024:,.1f} GiB, and {spare}: {', '.join(cards)}")
    if job.is_here and peak > (limit := memory_limit_mib(job.device)):
        screen.warn(
            f"this step does not fit: its peak of {peak / 1024:,.1f} GiB is more than the "
            f"{limit / 1024:,.1f} GiB that this machine allows"
        )


def fits(peak: float, gigabytes: int) -> bool:
    """Whether a step whose peak is so many MiB fits on a card of this size."""
    return peak + SPARE_MIB <= 1024 * gigabytes


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        print_plan(Config.from_cli(argv, prog=prog or "minigrpo plan"), DistContext())


if __name__ == "__main__":
    main()

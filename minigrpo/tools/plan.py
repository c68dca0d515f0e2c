"""Estimate the cost of one training step without running it: `minigrpo plan [flags of train]`.

`minigrpo train --plan` prints the same table; under torchrun, the table is for each process.
"""

from collections.abc import Sequence

from ..config import Config
from ..runtime.distributed import DistContext
from ..runtime.logging import Screen
from ..runtime.machine import memory_limit_mib
from ..runtime.planner import Planner
from .messages import one_line_errors


def print_plan(config: Config, dist: DistContext) -> None:
    """Print the estimates of one step, from the main process. Raises ValueError in one line."""
    planner = Planner(config, dist)
    if not dist.is_main:
        return
    screen, found = Screen(has_result=True), planner.estimates()
    each = f", in each of {dist.world_size} processes" if dist.world_size > 1 else ""
    names = list(reversed(found))  # the most likely first
    cells = [found[name].cells() for name in names]
    rows = list(dict.fromkeys(row for column in cells for row in column))
    table = [[row, *(column.get(row, "") for column in cells)] for row in rows]
    screen.table(f"estimate for one step{each}", ["", *names], table)
    kind = "GPU memory" if planner.device.type == "cuda" else "memory besides the program itself"
    screen.say(f"MiB: {kind}. seconds: on this machine, by probes of the model's own sizes.")
    peak, limit = found[names[0]].peak_mib, memory_limit_mib(planner.device)
    if peak > limit:
        screen.warn(
            f"this step does not fit: its peak of {peak / 1024:,.1f} GiB is more than the "
            f"{limit / 1024:,.1f} GiB that this machine allows"
        )


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        print_plan(Config.from_cli(argv, prog=prog or "minigrpo plan"), DistContext())


if __name__ == "__main__":
    main()

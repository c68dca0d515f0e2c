"""Estimate the cost of one training step without running it: `minigrpo plan [flags of train]`.

`minigrpo train --plan` prints the same table; under torchrun, the table is for each process.
"""

from collections.abc import Sequence

from ..config import Config
from ..runtime.distributed import DistContext
from ..runtime.estimate import estimate_run
from ..runtime.logging import Screen
from ..runtime.startup import check_machine
from .messages import one_line_errors


def print_plan(config: Config, dist: DistContext) -> None:
    """Print the estimate of one step, from the main process. Raises ValueError in one line."""
    check_machine(config, dist)
    plan = estimate_run(config, dist.world_size)
    each = f", in each of {dist.world_size} processes" if dist.world_size > 1 else ""
    title = f"estimate for one step whose completions share no prefix{each}"
    Screen(rank=dist.rank).table(title, ["", ""], plan.rows())


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        print_plan(Config.from_cli(argv, prog=prog or "minigrpo plan"), DistContext())


if __name__ == "__main__":
    main()

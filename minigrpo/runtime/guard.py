"""What to do after steps whose loss or gradient is not finite: skip, then slow down, then stop."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

BAD_STEPS_TO_HALVE = 3  # in a row; then halve the learning rate and train in float32
BAD_STEPS_TO_STOP = 6


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


@dataclass
class NonFiniteGuard:
    """Counts skipped steps, and decides when to halve the learning rate and when to stop."""

    skipped: int = 0
    in_a_row: int = 0
    halvings: int = 0  # of the learning rate; after the first, training continues in float32

    def accept(self) -> None:
        """Record a step with a finite loss and gradient."""
        self.in_a_row = 0

    def skip(self, warn: Callable[[str], object]) -> None:
        """Record a skipped step. Raises Diverged after BAD_STEPS_TO_STOP in a row."""
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= BAD_STEPS_TO_STOP:
            raise Diverged(
                f"{BAD_STEPS_TO_STOP} steps in a row had a loss or gradient that is not finite; "
                "the weights are those before them. A smaller --learning-rate, or no --use-amp, "
                "may help"
            )
        if self.in_a_row == BAD_STEPS_TO_HALVE:
            self.halvings += 1
            warn(
                f"{BAD_STEPS_TO_HALVE} such steps in a row: "
                "from here on half the learning rate, and float32"
            )

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        self.halvings = state.get("halvings", 0)

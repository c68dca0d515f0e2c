"""What a run does when numbers are not finite, and when memory runs out.

A bad step is one whose loss or gradient is not finite: skip it, then slow down, then stop. Under
float16 an infinite gradient is also how the loss scaler finds its scale, down to SCALE_FLOOR.

Work that runs out of memory is tried again in smaller parts. Tokens do not change, and neither do
gradients, except for bnpo, which depends on the micro-batch.
"""

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

BAD_STEPS_TO_HALVE = 3  # in a row; then halve the learning rate and train in float32
BAD_STEPS_TO_STOP = 6
SCALE_FLOOR = 1.0  # below it, the scaler would make gradients smaller than they are
T = TypeVar("T")
Say = Callable[[str], object]


class RunFailed(RuntimeError):
    """The run cannot continue. The message is one line; the command ends with exit code 1."""


class Diverged(RunFailed):
    """Losses, gradients or weights are not finite, and skipping steps does not help."""


@dataclass
class NonFiniteGuard:
    """Counts skipped steps, and decides when to halve the learning rate and when to stop."""

    skipped: int = 0
    in_a_row: int = 0
    halvings: int = 0  # of the learning rate; after the first, training continues in float32
    overflows: int = 0  # updates that the loss scaler skipped while it lowered its scale

    def accept(self) -> None:
        """Record a step with a finite loss and gradient."""
        self.in_a_row = 0

    def check(self, steps: int = 0) -> None:
        """Raise Diverged if BAD_STEPS_TO_STOP in a row were bad, `steps` more of them included."""
        if self.in_a_row + steps >= BAD_STEPS_TO_STOP:
            raise Diverged(
                f"{BAD_STEPS_TO_STOP} steps in a row had a loss or gradient that is not finite; "
                "a smaller --learning-rate, or no --use-amp, may help"
            )

    def skip(self, warn: Say, *, partly: bool) -> None:
        """Record a skipped step; `partly`: an update of it was made before the bad one."""
        if not partly:
            self.check(1)  # the step is not done, so a resume meets it again
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == BAD_STEPS_TO_HALVE:
            self.halvings += 1
            warn(f"{self.in_a_row} bad steps in a row: now half the learning rate, and float32")

    def update_scale(
        self, scaler: torch.amp.GradScaler, loss: Tensor, step: int, warn: Say
    ) -> bool:
        """Update the loss scale; return whether the update was skipped only to lower it.

        A float16 overflow explains neither a loss that is not finite, nor one after the fall back
        to float32.
        """
        before = scaler.get_scale()
        scaler.update()
        after = scaler.get_scale()
        fell = SCALE_FLOOR <= after < before
        if not fell or self.halvings or not torch.isfinite(loss):
            return False
        self.overflows += 1
        warn(f"step {step + 1}: float16 overflow, no update; the loss scale is now {after:g}")
        return True

    def metrics(self, scaler: torch.amp.GradScaler) -> dict[str, float]:
        """Counts since the beginning of the run, and the scale of a scaler that is in use."""
        counts = {"skipped_steps": float(self.skipped)}
        if scaler.is_enabled():
            counts["scaler/scale"] = scaler.get_scale()
            counts["scaler/skipped_steps"] = float(self.overflows)
        return counts

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        vars(self).update(state)


def weight_norm(model: nn.Module) -> Tensor:
    """The norm of what is trained, as a scalar on its device; not finite if a weight is not."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return torch.nn.utils.get_total_norm(trained)


def check_weights(model: nn.Module, norm: float, step: int, learning_rate: float) -> None:
    """Raise Diverged, before anything is saved, if weights are not finite after a step.

    `norm` is their `weight_norm`. A large learning rate can do that to a finite gradient.
    """
    if math.isfinite(norm):
        return
    if all(p.isfinite().all() for p in model.parameters() if p.requires_grad):
        return  # weights beyond 1e19, whose squares overflow
    raise Diverged(
        f"step {step + 1}: the update made weights that are not finite; a smaller --learning-rate "
        f"than {learning_rate:g} may help"
    )


# --- out of memory --------------------------------------------------------------------------------

# what a plain RuntimeError says: only CUDA's caching allocator has a type of its own
OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


class OOMBackoff:
    """How many prompts go through the model at a time; halved whenever memory runs out."""

    def __init__(self, what: str, flag: str, size: int, warn: Say = lambda text: None) -> None:
        """`flag` sets `size`, the prompts at a time at first; 0 for all. `what` is the work."""
        self.what, self.flag, self.size, self.warn = what, flag, size, warn

    def size_of(self, total: int) -> int:
        """How many of `total` prompts to run at a time."""
        return min(self.size or total, total)

    def run(self, function: Callable[[int], T], total: int) -> T:
        """Return `function(size)`, retried with half the size until it fits.

        If a single prompt does not fit, the error is raised as it came.
        """
        while True:
            size = self.size_of(total)
            try:
                return function(size)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # outside the handler, whose traceback would keep tensors alive that must be freed
            self.size = size // 2
            self.warn(f"{self.what}: out of memory; {self.size} prompts at a time ({self.flag})")
            gc.collect()  # a failed backward pass may leave tensors in reference cycles
            torch.cuda.empty_cache()

"""What a run does when numbers are not finite, and when memory runs out."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from .errors import RunFailed
from .types import Warn

BAD_STEPS_TO_STOP = 6  # in a row
SCALE_FLOOR = 1.0  # below it, the scaler would make gradients smaller than they are
T = TypeVar("T")


class Diverged(RunFailed):
    """Losses, gradients or weights are not finite."""


@dataclass
class NonFiniteGuard:
    """Counts skipped steps, and decides when to stop."""

    skipped: int = 0
    in_a_row: int = 0
    overflows: int = 0  # updates that the loss scaler skipped while it lowered its scale

    def skip(self) -> None:
        self.skipped += 1
        self.in_a_row += 1

    def check(self) -> None:
        if self.in_a_row >= BAD_STEPS_TO_STOP:
            raise Diverged(
                f"{BAD_STEPS_TO_STOP} steps in a row had a loss or gradient that is not finite; "
                "a smaller --learning-rate, or no --use-amp, may help"
            )

    def update_scale(self, scaler: torch.amp.GradScaler, loss: Tensor) -> bool:
        """Update the loss scale; return whether a finite loss was skipped only to lower it."""
        before = scaler.get_scale()
        scaler.update()
        lowered = SCALE_FLOOR <= scaler.get_scale() < before and bool(torch.isfinite(loss))
        self.overflows += lowered
        return lowered

    def metrics(self, scaler: torch.amp.GradScaler) -> dict[str, float]:
        """Counts of the whole run, and the scale of a scaler that is in use."""
        counts = {"skipped_steps": float(self.skipped)}
        if scaler.is_enabled():
            counts["scaler/scale"] = scaler.get_scale()
            counts["scaler/skipped_steps"] = float(self.overflows)
        return counts


def largest_weight(model: nn.Module) -> Tensor:
    """The largest trained weight here, a scalar on its device; not finite if one of them is not."""
    trained = [weights.detach() for weights in model.parameters() if weights.requires_grad]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in trained]
    trained = [weights for weights in local if weights.numel()]
    if trained[0].is_cuda:  # one launch, where a CPU would take six times as long
        return get_total_norm(trained, torch.inf)
    return torch.stack([torch.stack(weights.aminmax()) for weights in trained]).abs().max()


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Only CUDA's caching allocator raises a type of its own. Others raise a RuntimeError.
    texts = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return any(text in str(error) for text in texts)


@dataclass
class OOMBackoff:
    """How many prompts go through the model at a time, which is halved when memory runs out."""

    what: str  # the work
    flag: str  # the flag that sets the size
    size: int  # prompts at a time; 0 is all
    warn: Warn
    # frees what could be made again, and returns whether that was anything
    release: Callable[[], bool] = lambda: False

    def run(self, function: Callable[[int], T], total: int, *, retry: bool = True) -> T:
        """Return `function(size)` for at most `total` prompts at a time, halved until it fits."""
        while True:
            size = min(self.size or total, total)
            try:
                return function(size)
            except Exception as error:
                if not retry or not is_out_of_memory(error):
                    raise
                has_released = self.release()
                if size == 1 and not has_released:
                    raise
            # outside the handler, whose traceback would keep tensors alive
            now = "what rollouts had kept is freed"
            if not has_released:
                self.size = size // 2
                now = f"{self.size} prompts at a time ({self.flag})"
            self.warn(f"{self.what}: out of memory; {now}")
            gc.collect()  # a failed backward pass may leave tensors in reference cycles
            torch.cuda.empty_cache()

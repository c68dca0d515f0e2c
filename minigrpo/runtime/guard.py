"""What to do when numbers are not finite: skip the step, then slow down, then stop.

A bad step is one whose loss or gradient is not finite. Under float16, an infinite gradient is also
how the loss scaler finds its scale: it lowers the scale and skips the update. That is no bad step
as long as the scale can fall, which is down to SCALE_FLOOR.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from .failures import Diverged
from .saved_state import misfit
from .text import quoted

BAD_STEPS_TO_HALVE = 3  # in a row; then halve the learning rate and train in float32
BAD_STEPS_TO_STOP = 6
SCALE_FLOOR = 1.0  # below it, the scaler would make gradients smaller than they are
Say = Callable[[str], object]


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
                "the weights are the last finite ones. A smaller --learning-rate, or no --use-amp, "
                "may help"
            )

    def skip(self, warn: Say, *, partly: bool) -> None:
        """Record a skipped step; `partly`: an update of it was made before the bad one.

        Raises Diverged for the last of BAD_STEPS_TO_STOP in a row. One that was made in part is
        done, and the next `check` raises instead.
        """
        if not partly:
            self.check(1)  # not counted: the step is not done
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == BAD_STEPS_TO_HALVE:
            self.halvings += 1
            warn(
                f"{BAD_STEPS_TO_HALVE} such steps in a row: "
                "from here on half the learning rate, and float32"
            )

    def update_scale(
        self, scaler: torch.amp.GradScaler, loss: Tensor, step: int, warn: Say
    ) -> bool:
        """Update the loss scale; return whether the update was skipped only to lower it.

        An infinite gradient of a finite loss is no bad step as long as the scale can fall. At
        SCALE_FLOOR it stays, and once training has fallen back to float32 it explains nothing.
        """
        before = scaler.get_scale()
        scaler.update()
        after = scaler.get_scale()
        if after < SCALE_FLOOR:
            scaler.update(SCALE_FLOOR)
        fell = after < before and before > SCALE_FLOOR
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
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any], steps: int) -> None:
        """Raises ValueError for counts that a run cannot have after `steps` steps."""
        counts = {field.name: state.get(field.name, 0) for field in fields(self)}
        if problem := misfit(counts, asdict(self), "guard"):
            raise ValueError(problem)
        most = {
            "skipped": steps,
            "in_a_row": min(counts["skipped"], BAD_STEPS_TO_STOP),
            "halvings": counts["skipped"] // BAD_STEPS_TO_HALVE,
        }
        for name, count in counts.items():
            if not 0 <= count <= most.get(name, count):
                raise ValueError(
                    f"guard.{name} is {count}, after {steps} steps with {counts['skipped']} skipped"
                )
            setattr(self, name, count)


def load_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, Any]) -> None:
    """Load the scale of a loss scaler. Raises ValueError if the state does not fit."""
    own = scaler.state_dict()
    if problem := misfit(saved, own, "scaler"):
        raise ValueError(problem)
    varies = {name: saved[name] for name in ("scale", "_growth_tracker")}
    if saved != {**own, **varies} or saved["scale"] < SCALE_FLOOR or saved["_growth_tracker"] < 0:
        raise ValueError(f"scaler is {quoted(saved)}")
    scaler.load_state_dict(dict(saved))


def weight_norm(model: nn.Module) -> Tensor:
    """The norm of what is trained, as a scalar on its device; not finite if a weight is not.

    One fused pass over the weights, and no device sync.
    """
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return torch.nn.utils.get_total_norm(trained)


def check_weights(model: nn.Module, norm: float, step: int, learning_rate: float) -> None:
    """Raise Diverged if weights are not finite after a step; `norm` is their `weight_norm`.

    A finite gradient can do that: a learning rate of 1e38 overflows in the update itself. The
    weights before the step are gone, so the run ends before anything is saved.
    """
    if math.isfinite(norm):
        return
    if all(p.isfinite().all() for p in model.parameters() if p.requires_grad):
        return  # weights beyond 1e19, whose squares overflow
    raise Diverged(
        f"step {step + 1}: the update made weights that are not finite, with a learning rate of "
        f"{learning_rate:g}; nothing of it is saved. A smaller --learning-rate may help"
    )

"""Rules about skipped steps, time and memory, and a note about the loss."""

import numpy as np

from ..run_data import RunData, mean
from .said import Said


def skipped(run: RunData, threshold: float) -> Said | None:
    counts = run.series("skipped_steps")
    number = np.nanmax(counts) if np.isfinite(counts).any() else 0
    if not number > threshold:
        return None
    first = next(r["step"] for r in run.metrics if r.get("skipped_steps"))
    return Said(
        "Steps were skipped, because their loss or gradient was not finite.",
        f"{number:.0f} steps, the first at step {first}",
        "The batches are in bad_batches/. Lower --learning-rate, or use --no-use-amp.",
    )


ADVICE = {
    "reward": "--num-reward-workers, or --overlap-rewards with several rollout batches",
    "data": "a faster disk, or a task that makes its examples faster",
    "reference": "--no-offload-reference, --use-amp, or a run without --kl-coef",
}


def slow_phase(run: RunData, threshold: float) -> Said | None:
    step = run.end("step_time")
    part = {name: run.end(f"time/{name}") / step for name in ADVICE} if step > 0 else {}
    worst = max(part, key=lambda name: np.nan_to_num(part[name]), default="")
    if not worst or not part[worst] > threshold:
        return None
    return Said(
        f"The step waits for its {worst} phase.",
        f"{part[worst]:.0%} of {step:.2g} s per step in {run.last_steps}",
        f"What may help: {ADVICE[worst]}.",
    )


def memory_near_limit(run: RunData, threshold: float) -> Said | None:
    limit, peak = run.memory_limit_mib, run.series("memory/peak_mib")
    most = np.nanmax(peak) if np.isfinite(peak).any() else 0.0
    if not most > threshold * limit:
        return None
    return Said(
        "Memory is nearly full; a batch of longer texts may not fit.",
        f"peak {most:,.0f} MiB of the {limit:,.0f} MiB that this machine allows",
        "--micro-batch-size, --rollout-batch-size, --gradient-checkpointing and "
        "--chunked-logprobs need less; `minigrpo plan` shows by how much.",
    )


def loss_is_zero(run: RunData, threshold: float) -> Said | None:
    losses = run.series("loss")
    one_update = run.settings["num_iterations"] == 1 and not run.settings["kl_coef"]
    if run.supervised or not one_update or not mean(np.abs(losses)) < threshold:
        return None
    return Said(
        "The loss is about 0, and that is right.",
        f"mean |loss| {mean(np.abs(losses)):.1g}",
        "With one update per rollout the ratio is 1, and the advantages of a group add up to 0. "
        "The gradient is not 0; look at the reward instead.",
    )
